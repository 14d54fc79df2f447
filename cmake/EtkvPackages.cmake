# Targets for the MLX and the ExecuTorch that pip has installed: etkv::mlx,
# etkv::executorch and etkv::executorch_{threadpool,kernels,xnnpack}. etkv's build
# uses this file, and so does the installed etkvConfig.cmake.
#
# Search order:
#   ETKV_MLX_DIR, ETKV_EXECUTORCH_DIR   the folders `mlx` and `executorch`
#   ETKV_PYTHON                         a Python that has them: a CMake variable or
#                                       an environment variable; else `python3`
# The C++ interfaces of both change from release to release, so exact releases are
# required.
include_guard(GLOBAL)

set_property(GLOBAL PROPERTY ETKV_MLX_VERSION 0.32.2)
set_property(GLOBAL PROPERTY ETKV_EXECUTORCH_VERSION 1.5.1)
set_property(GLOBAL PROPERTY ETKV_SCIPY_OPENBLAS32_VERSION 0.3.34.481.3)
# The file or folder that identifies each package; OpenBLAS is for Linux only.
set_property(GLOBAL PROPERTY ETKV_MLX_FILE include/mlx)
set_property(GLOBAL PROPERTY ETKV_EXECUTORCH_FILE include/executorch)
set_property(GLOBAL PROPERTY ETKV_SCIPY_OPENBLAS32_FILE lib/libscipy_openblas.so)

# etkv_package_folder(NAME PIP DIR WHY): sets DIR to the folder of the Python
# package NAME. If there is none, sets DIR to "" and WHY to an error message.
function(etkv_package_folder name pip dir why)
  string(TOUPPER ${name} upper)
  get_property(version GLOBAL PROPERTY ETKV_${upper}_VERSION)
  get_property(file GLOBAL PROPERTY ETKV_${upper}_FILE)
  set(install "pip install '${pip}==${version}'")
  set(${why} "" PARENT_SCOPE)
  if(ETKV_${upper}_DIR)
    if(EXISTS ${ETKV_${upper}_DIR}/${file})
      set(${dir} ${ETKV_${upper}_DIR} PARENT_SCOPE)
      return()
    endif()
    set(found "ETKV_${upper}_DIR is ${ETKV_${upper}_DIR}, which has no ${file}")
  else()
    set(python ${ETKV_PYTHON})
    if(NOT python)
      set(python $ENV{ETKV_PYTHON})
    endif()
    if(NOT python)
      set(python python3)
    endif()
    execute_process(
      COMMAND ${python} -c
              "import importlib.util as u; print(list(u.find_spec('${name}').submodule_search_locations)[0])"
      OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE
      RESULT_VARIABLE failed ERROR_QUIET)
    if(NOT failed AND EXISTS ${folder}/${file})
      set(${dir} ${folder} PARENT_SCOPE)
      return()
    endif()
    set(found "${python} has none")
  endif()
  set(${dir} "" PARENT_SCOPE)
  set(${why}
      "etkv needs ${name} ${version}, and ${found}. Install it with `${install}` \
and set ETKV_PYTHON to the Python that has it, or set ETKV_${upper}_DIR to its \
folder `${name}`."
      PARENT_SCOPE)
endfunction()

# etkv_check_release(NAME PIP DIR FOUND WHY): sets WHY to an error message if FOUND is
# not the required release.
function(etkv_check_release name pip dir found why)
  string(TOUPPER ${name} upper)
  get_property(version GLOBAL PROPERTY ETKV_${upper}_VERSION)
  if(NOT found STREQUAL version)
    set(${why}
        "etkv needs ${name} ${version}, and ${dir} is ${name} ${found}. Install \
it with `pip install '${pip}==${version}'`, or point ETKV_PYTHON or \
ETKV_${upper}_DIR elsewhere."
        PARENT_SCOPE)
  endif()
endfunction()

# etkv_shared_library(TARGET FILE): an imported library that a program links even if it
# uses none of its symbols.
#
# A program's run path applies only to libraries that the program itself needs, not to
# their dependencies. So the program links MLX, and libetkv finds it already loaded.
function(etkv_shared_library target file)
  add_library(${target} SHARED IMPORTED GLOBAL)
  set_property(TARGET ${target} PROPERTY IMPORTED_LOCATION ${file})
  if(NOT APPLE)
    set_property(
      TARGET ${target} APPEND PROPERTY INTERFACE_LINK_OPTIONS
      "LINKER:--push-state,--no-as-needed,${file},--pop-state")
  endif()
endfunction()

# etkv_find_mlx(WHY): creates etkv::mlx, or sets WHY to an error message.
function(etkv_find_mlx why)
  set(${why} "" PARENT_SCOPE)
  if(TARGET etkv::mlx)
    return()
  endif()
  set(pip mlx)
  if(NOT APPLE)
    set(pip "mlx[cpu]")
  endif()
  etkv_package_folder(mlx ${pip} dir problem)
  if(NOT problem)
    set(numbers "")
    if(EXISTS ${dir}/include/mlx/version.h)
      file(STRINGS ${dir}/include/mlx/version.h numbers
           REGEX "^#define MLX_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
    endif()
    list(TRANSFORM numbers REPLACE "^.* ([0-9]+).*$" "\\1")
    list(JOIN numbers "." found)
    etkv_check_release(mlx ${pip} ${dir} "${found}" problem)
  endif()
  if(problem)
    set(${why} "${problem}" PARENT_SCOPE)
    return()
  endif()
  etkv_shared_library(etkv::mlx ${dir}/lib/libmlx${CMAKE_SHARED_LIBRARY_SUFFIX})
  set_property(
    TARGET etkv::mlx PROPERTY INTERFACE_INCLUDE_DIRECTORIES ${dir}/include)
  # GNU ld resolves the libraries that libmlx itself needs.
  cmake_path(GET dir PARENT_PATH site_packages)
  if(EXISTS ${site_packages}/mlx_cpu.libs)
    set_property(
      TARGET etkv::mlx APPEND PROPERTY INTERFACE_LINK_OPTIONS
      "LINKER:-rpath-link,${site_packages}/mlx_cpu.libs")
  endif()
endfunction()

# etkv_find_openblas(DIR WHY): sets DIR to the folder of libscipy_openblas.so. If there
# is none, sets DIR to "" and WHY to an error message.
function(etkv_find_openblas dir why)
  etkv_package_folder(scipy_openblas32 scipy-openblas32 folder problem)
  set(${why} "${problem}" PARENT_SCOPE)
  set(${dir} "" PARENT_SCOPE)
  if(folder)
    set(${dir} ${folder}/lib PARENT_SCOPE)
  endif()
endfunction()

# etkv_find_executorch(WHY): creates etkv::executorch, or sets WHY to an error message.
function(etkv_find_executorch why)
  set(${why} "" PARENT_SCOPE)
  if(TARGET etkv::executorch)
    return()
  endif()
  etkv_package_folder(executorch executorch dir problem)
  if(NOT problem)
    set(found "of an unknown release")
    set(file ${dir}/share/cmake/executorch-config-version.cmake)
    if(EXISTS ${file})
      file(STRINGS ${file} line REGEX "^set\\(PACKAGE_VERSION ")
      string(REGEX REPLACE "^.*\"([^\"]+)\".*$" "\\1" found "${line}")
    endif()
    etkv_check_release(executorch executorch ${dir} "${found}" problem)
  endif()
  if(problem)
    set(${why} "${problem}" PARENT_SCOPE)
    return()
  endif()
  etkv_shared_library(
    etkv::executorch ${dir}/lib/libexecutorch${CMAKE_SHARED_LIBRARY_SUFFIX})
  set_target_properties(
    etkv::executorch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${dir}/include;${dir}/include/executorch/runtime/core/portable_type/c10"
    # As in the wheel's CMake package. Without the second definition, classes would be
    # smaller in the program than in the library.
    INTERFACE_COMPILE_DEFINITIONS
      "C10_USING_CUSTOM_GENERATED_MACROS;ET_EVENT_TRACER_ENABLED"
    INTERFACE_COMPILE_FEATURES cxx_std_17)
  # Additional libraries for CPU programs.
  set(library ${dir}/lib/libexecutorch_)
  set(suffix ${CMAKE_SHARED_LIBRARY_SUFFIX})
  etkv_shared_library(etkv::executorch_threadpool ${library}threadpool${suffix})
  etkv_shared_library(etkv::executorch_kernels ${library}kernels_optimized${suffix})
  etkv_shared_library(etkv::executorch_xnnpack ${library}backend_xnnpack${suffix})
endfunction()
