# etkv::etkv and etkv::mlx_backend, shared and static.

etkv_find_mlx(problem)
if(NOT problem AND ETKV_BUILD_MLX_BACKEND)
  etkv_find_executorch(problem)
endif()
if(problem)
  message(FATAL_ERROR "${problem} In etkv's own folder, `make setup` does both.")
endif()

# The bridge to the delegate is a default feature.
set(features "")
if(NOT ETKV_BUILD_MLX_BACKEND)
  set(features NO_DEFAULT_FEATURES)
endif()
etkv_rust_library(etkv_rust PACKAGE etkv-capi LIBRARY libetkv_capi.a ${features})

# Compiled once for both kinds of library.
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

# etkv_shared(NAME EXPORTS): what is common to the shared libraries. EXPORTS.map and
# EXPORTS.symbols have the symbols that leave them.
function(etkv_shared name exports)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  if(NOT SKBUILD)
    # A wheel has no symbolic links, and no second version beside its own.
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
    # Each finds the other beside it; MLX and ExecuTorch are the program's.
    set_property(TARGET ${name} PROPERTY INSTALL_RPATH $ORIGIN)
  endif()
  set_property(TARGET ${name} APPEND PROPERTY LINK_DEPENDS ${file})
endfunction()

set(etkv_includes
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

# ---- Matrix products on the CPU -------------------------------------------------

# A program needs it before libmlx, whose products it takes the place of.
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
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
    message(STATUS "MLX's own BLAS is used on the CPU, which is slow. ${problem}")
  endif()
  if(SKBUILD)
    # Beside etkv in a folder of Python packages. In another place LD_LIBRARY_PATH
    # or ETKV_BLAS leads to it: what this library opens is not looked for along the
    # program's run path.
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
# Rust's part is called from outside only, so all of it is taken; what leaves is
# the C interface.
target_link_libraries(
  etkv
  PRIVATE $<LINK_LIBRARY:WHOLE_ARCHIVE,etkv_rust>
  PUBLIC $<TARGET_NAME_IF_EXISTS:etkv::blas> etkv::mlx)

# What Rust's archive needs is MLX, the C++ library for mlx-c, and the system's.
add_library(etkv_static INTERFACE)
add_library(etkv::etkv_static ALIAS etkv_static)
target_include_directories(etkv_static INTERFACE ${etkv_includes})
target_link_libraries(
  etkv_static INTERFACE
  $<BUILD_INTERFACE:etkv_rust>
  $<INSTALL_INTERFACE:$<INSTALL_PREFIX>/${CMAKE_INSTALL_LIBDIR}/libetkv.a>
  $<TARGET_NAME_IF_EXISTS:etkv::blas> etkv::mlx)
if(APPLE)
  target_link_libraries(etkv_static INTERFACE c++)
else()
  target_link_libraries(etkv_static INTERFACE stdc++ dl pthread m)
endif()

if(NOT ETKV_BUILD_MLX_BACKEND)
  file(CONFIGURE OUTPUT empty.cpp CONTENT "// Everything is in the archive.\n")
  target_sources(etkv PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/empty.cpp)
  return()
endif()

# ---- The delegate ---------------------------------------------------------------

etkv_objects(etkv_interpreter cpp/interpreter.cpp)
target_include_directories(
  etkv_interpreter PRIVATE ${ETKV_CARGO_TARGET_DIR}/cxxbridge)
# The bridge's headers are made by the package's build script.
add_dependencies(etkv_interpreter etkv_rust_build)
target_sources(etkv PRIVATE $<TARGET_OBJECTS:etkv_interpreter>)

etkv_objects(etkv_backend cpp/backend.cpp)
target_link_libraries(etkv_backend PRIVATE etkv::executorch)

add_library(etkv_mlx_backend SHARED $<TARGET_OBJECTS:etkv_backend>)
add_library(etkv::mlx_backend ALIAS etkv_mlx_backend)
set_target_properties(etkv_mlx_backend PROPERTIES EXPORT_NAME mlx_backend)
etkv_shared(etkv_mlx_backend cpp/nothing)
target_link_libraries(etkv_mlx_backend PUBLIC etkv etkv::executorch)
# It registers itself when it is loaded, and no program names anything of it:
# where the linker drops libraries that are not named, it is told not to.
if(NOT APPLE)
  target_link_options(
    etkv_mlx_backend INTERFACE
    $<BUILD_INTERFACE:LINKER:--push-state,--no-as-needed,$<TARGET_FILE:etkv_mlx_backend>,--pop-state>
    $<INSTALL_INTERFACE:LINKER:--push-state,--no-as-needed,$<TARGET_FILE:etkv::mlx_backend>,--pop-state>)
endif()

add_library(
  etkv_mlx_backend_archive STATIC
  $<TARGET_OBJECTS:etkv_backend> $<TARGET_OBJECTS:etkv_interpreter>)
set_target_properties(
  etkv_mlx_backend_archive PROPERTIES
  LINKER_LANGUAGE CXX
  OUTPUT_NAME etkv_mlx_backend
  EXPORT_NAME mlx_backend_archive)
# The same for a linker that takes from an archive what is named.
add_library(etkv_mlx_backend_static INTERFACE)
add_library(etkv::mlx_backend_static ALIAS etkv_mlx_backend_static)
set_target_properties(
  etkv_mlx_backend_static PROPERTIES EXPORT_NAME mlx_backend_static)
target_link_libraries(
  etkv_mlx_backend_static INTERFACE
  $<BUILD_INTERFACE:$<LINK_LIBRARY:WHOLE_ARCHIVE,etkv_mlx_backend_archive>>
  $<INSTALL_INTERFACE:$<LINK_LIBRARY:WHOLE_ARCHIVE,etkv::mlx_backend_archive>>
  etkv_static etkv::executorch)
