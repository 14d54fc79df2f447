# etkv::etkv, etkv::mlx_backend and etkv::cpu_backend, shared and static.

set(problem "")
if(ETKV_MLX)
  etkv_find_mlx(problem)
endif()
if(NOT problem AND (ETKV_BUILD_MLX_BACKEND OR ETKV_BUILD_CPU_BACKEND))
  etkv_find_executorch(problem)
endif()
if(problem)
  message(FATAL_ERROR "${problem} In etkv's own folder, `make setup` does both.")
endif()

etkv_rust_library(etkv_rust PACKAGE etkv-capi LIBRARY libetkv_capi.a)

# Objects that are compiled once for the shared and the static library.
function(etkv_objects name source)
  add_library(${name} OBJECT ${source})
  set_target_properties(
    ${name} PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    CXX_STANDARD 17
    CXX_STANDARD_REQUIRED ON
    CXX_EXTENSIONS OFF)
  target_include_directories(
    ${name} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
  target_compile_options(${name} PRIVATE -Wall -Wextra -Werror)
endfunction()

# etkv_shared(NAME EXPORTS): settings of all shared libraries. EXPORTS.map and
# EXPORTS.symbols list the exported symbols.
function(etkv_shared name exports)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  if(NOT SKBUILD)
    # A wheel has no symbolic links, and contains only one version.
    set_target_properties(
      ${name} PROPERTIES
      VERSION ${PROJECT_VERSION}
      SOVERSION ${PROJECT_VERSION_MAJOR})
  endif()
  if(APPLE)
    set(file ${PROJECT_SOURCE_DIR}/${exports}.symbols)
    target_link_options(${name} PRIVATE -Wl,-exported_symbols_list,${file})
    set_property(TARGET ${name} PROPERTY INSTALL_RPATH @loader_path)
  else()
    set(file ${PROJECT_SOURCE_DIR}/${exports}.map)
    target_link_options(
      ${name} PRIVATE -Wl,--version-script=${file} -Wl,-z,defs)
    # etkv's libraries find each other in the same folder; the program finds MLX and
    # ExecuTorch.
    set_property(TARGET ${name} PROPERTY INSTALL_RPATH $ORIGIN)
  endif()
  set_property(TARGET ${name} APPEND PROPERTY LINK_DEPENDS ${file})
endfunction()

set(etkv_includes
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

# ---- Matrix products on the CPU -------------------------------------------------

# Replaces matrix products of libmlx, so a program must load it before libmlx.
if(ETKV_MLX AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  add_library(etkv_blas SHARED crates/mlx-sys/shim/blas.c)
  add_library(etkv::blas ALIAS etkv_blas)
  set_target_properties(
    etkv_blas PROPERTIES EXPORT_NAME blas C_VISIBILITY_PRESET hidden)
  etkv_shared(etkv_blas cpp/blas)
  target_compile_options(etkv_blas PRIVATE -Wall -Wextra -Werror)
  target_link_libraries(etkv_blas PRIVATE dl pthread)
  target_link_options(
    etkv_blas INTERFACE
    $<BUILD_INTERFACE:LINKER:--push-state,--no-as-needed,$<TARGET_FILE:etkv_blas>,--pop-state>
    $<INSTALL_INTERFACE:LINKER:--push-state,--no-as-needed,$<TARGET_FILE:etkv::blas>,--pop-state>)
  etkv_find_openblas(openblas problem)
  if(openblas)
    set_property(TARGET etkv_blas PROPERTY BUILD_RPATH ${openblas})
  else()
    message(STATUS "On the CPU, the slow BLAS of MLX's wheel is used. ${problem}")
  endif()
  if(SKBUILD)
    # OpenBLAS is next to etkv in the folder of Python packages. In other installations
    # LD_LIBRARY_PATH or ETKV_BLAS leads to it, because the program's run path does not
    # apply to a library that this one opens.
    set_property(
      TARGET etkv_blas APPEND PROPERTY INSTALL_RPATH
      $ORIGIN/../../scipy_openblas32/lib)
  endif()
endif()

# ---- The caches ---------------------------------------------------------------

add_library(etkv SHARED)
add_library(etkv::etkv ALIAS etkv)
etkv_shared(etkv cpp/exports)
target_include_directories(etkv INTERFACE ${etkv_includes})
# Nothing in the library calls the Rust archive, so link all of it. Only the C
# interface is exported.
target_link_libraries(
  etkv
  PRIVATE $<LINK_LIBRARY:WHOLE_ARCHIVE,etkv_rust>
  PUBLIC $<TARGET_NAME_IF_EXISTS:etkv::blas> $<TARGET_NAME_IF_EXISTS:etkv::mlx>)

# The tables with which Python calls the C interface, next to the library.
if(ETKV_MLX AND PROJECT_IS_TOP_LEVEL)
  execute_process(
    COMMAND ${ETKV_PYTHON} -c "import cffi"
    RESULT_VARIABLE problem OUTPUT_QUIET ERROR_QUIET)
  if(NOT problem)
    set(etkv_capi_tables ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/capi_tables.py)
    if(SKBUILD)
      set(etkv_capi_tables ${CMAKE_CURRENT_BINARY_DIR}/capi_tables.py)
    endif()
    file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/etkv/*.h)
    add_custom_command(
      OUTPUT ${etkv_capi_tables}
      COMMAND ${ETKV_PYTHON} ${PROJECT_SOURCE_DIR}/cmake/capi_tables.py
              ${CMAKE_C_COMPILER} ${PROJECT_SOURCE_DIR}/include ${etkv_capi_tables}
      DEPENDS ${headers} cmake/capi_tables.py
      VERBATIM)
    add_custom_target(etkv_capi_tables DEPENDS ${etkv_capi_tables})
    add_dependencies(etkv etkv_capi_tables)
  elseif(SKBUILD)
    message(FATAL_ERROR "etkv's wheel needs cffi: ${ETKV_PYTHON} has none")
  else()
    message(STATUS "Python cannot use this build: ${ETKV_PYTHON} has no cffi")
  endif()
endif()

# The Rust archive needs MLX, the C++ standard library, and system libraries.
add_library(etkv_static INTERFACE)
add_library(etkv::etkv_static ALIAS etkv_static)
target_include_directories(etkv_static INTERFACE ${etkv_includes})
target_compile_definitions(etkv_static INTERFACE ETKV_STATIC)
target_link_libraries(
  etkv_static INTERFACE
  $<BUILD_INTERFACE:etkv_rust>
  $<INSTALL_INTERFACE:$<INSTALL_PREFIX>/${CMAKE_INSTALL_LIBDIR}/libetkv.a>
  $<TARGET_NAME_IF_EXISTS:etkv::blas> $<TARGET_NAME_IF_EXISTS:etkv::mlx>)
if(APPLE)
  target_link_libraries(etkv_static INTERFACE c++)
else()
  target_link_libraries(etkv_static INTERFACE stdc++ dl pthread m)
endif()

if(NOT ETKV_BUILD_MLX_BACKEND AND NOT ETKV_BUILD_CPU_BACKEND)
  file(CONFIGURE OUTPUT empty.cpp CONTENT "// All code is in the archive.\n")
  target_sources(etkv PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/empty.cpp)
  return()
endif()

# ---- The delegates --------------------------------------------------------------

etkv_objects(etkv_interpreter cpp/interpreter.cpp)
target_compile_definitions(etkv_interpreter PRIVATE ETKV_BUILDING)
target_include_directories(
  etkv_interpreter PRIVATE ${ETKV_CARGO_TARGET_DIR}/cxxbridge)
# The package's build script writes the bridge's headers.
add_dependencies(etkv_interpreter etkv_rust_build)
target_sources(etkv PRIVATE $<TARGET_OBJECTS:etkv_interpreter>)

etkv_objects(etkv_delegate_objects cpp/delegate.cpp)
target_link_libraries(etkv_delegate_objects PRIVATE etkv::executorch)
# Common to all static backends.
add_library(
  etkv_delegate STATIC
  $<TARGET_OBJECTS:etkv_delegate_objects> $<TARGET_OBJECTS:etkv_interpreter>)
set_target_properties(
  etkv_delegate PROPERTIES LINKER_LANGUAGE CXX EXPORT_NAME delegate)
target_link_libraries(etkv_delegate INTERFACE etkv_static)

# etkv_backend(NAME libraries...): creates etkv::NAME and etkv::NAME_static, with the
# ExecuTorch libraries that programs of the backend need.
function(etkv_backend name)
  etkv_objects(etkv_${name}_objects cpp/${name}.cpp)
  target_link_libraries(etkv_${name}_objects PRIVATE etkv::executorch)

  add_library(
    etkv_${name} SHARED
    $<TARGET_OBJECTS:etkv_${name}_objects> $<TARGET_OBJECTS:etkv_delegate_objects>)
  add_library(etkv::${name} ALIAS etkv_${name})
  set_target_properties(etkv_${name} PROPERTIES EXPORT_NAME ${name})
  etkv_shared(etkv_${name} cpp/nothing)
  target_link_libraries(etkv_${name} PUBLIC etkv etkv::executorch ${ARGN})
  # The library registers itself when it is loaded, and programs use none of its symbols.
  # So tell the linker to keep it.
  if(NOT APPLE)
    target_link_options(
      etkv_${name} INTERFACE
      $<BUILD_INTERFACE:LINKER:--push-state,--no-as-needed,$<TARGET_FILE:etkv_${name}>,--pop-state>
      $<INSTALL_INTERFACE:LINKER:--push-state,--no-as-needed,$<TARGET_FILE:etkv::${name}>,--pop-state>)
  endif()

  add_library(etkv_${name}_archive STATIC $<TARGET_OBJECTS:etkv_${name}_objects>)
  set_target_properties(
    etkv_${name}_archive PROPERTIES
    LINKER_LANGUAGE CXX
    OUTPUT_NAME etkv_${name}
    EXPORT_NAME ${name}_archive)
  # Likewise, tell the linker to keep objects of the archive that nothing uses.
  add_library(etkv_${name}_static INTERFACE)
  add_library(etkv::${name}_static ALIAS etkv_${name}_static)
  set_target_properties(
    etkv_${name}_static PROPERTIES EXPORT_NAME ${name}_static)
  target_link_libraries(
    etkv_${name}_static INTERFACE
    $<BUILD_INTERFACE:$<LINK_LIBRARY:WHOLE_ARCHIVE,etkv_${name}_archive>>
    $<INSTALL_INTERFACE:$<LINK_LIBRARY:WHOLE_ARCHIVE,etkv::${name}_archive>>
    $<BUILD_INTERFACE:etkv_delegate> $<INSTALL_INTERFACE:etkv::delegate>
    etkv_static etkv::executorch ${ARGN})
endfunction()

if(ETKV_BUILD_MLX_BACKEND)
  etkv_backend(mlx_backend)
endif()
if(ETKV_BUILD_CPU_BACKEND)
  etkv_backend(
    cpu_backend
    etkv::executorch_threadpool etkv::executorch_kernels etkv::executorch_xnnpack)
endif()
