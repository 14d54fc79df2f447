# The ExecuTorch and the MLX that pip has installed, as targets pip::executorch
# and pip::mlx. ETKV_PYTHON says whose pip.

set(ETKV_PYTHON "${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python"
    CACHE FILEPATH "The Python whose ExecuTorch and MLX to build against")

function(etkv_pip_package name out)
  execute_process(
    COMMAND ${ETKV_PYTHON} -c
            "import importlib.util as u; print(list(u.find_spec('${name}').submodule_search_locations)[0])"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "${ETKV_PYTHON} cannot import ${name}; run `make setup`, or set ETKV_PYTHON")
  endif()
  set(${out} ${folder} PARENT_SCOPE)
endfunction()

etkv_pip_package(executorch ETKV_EXECUTORCH_DIR)
etkv_pip_package(mlx ETKV_MLX_DIR)

add_library(pip::executorch SHARED IMPORTED GLOBAL)
set_target_properties(
  pip::executorch PROPERTIES
  IMPORTED_LOCATION
    ${ETKV_EXECUTORCH_DIR}/lib/libexecutorch${CMAKE_SHARED_LIBRARY_SUFFIX}
  INTERFACE_INCLUDE_DIRECTORIES
    "${ETKV_EXECUTORCH_DIR}/include;${ETKV_EXECUTORCH_DIR}/include/executorch/runtime/core/portable_type/c10"
  INTERFACE_COMPILE_DEFINITIONS C10_USING_CUSTOM_GENERATED_MACROS)

add_library(pip::mlx SHARED IMPORTED GLOBAL)
set_target_properties(
  pip::mlx PROPERTIES
  IMPORTED_LOCATION ${ETKV_MLX_DIR}/lib/libmlx${CMAKE_SHARED_LIBRARY_SUFFIX}
  INTERFACE_INCLUDE_DIRECTORIES ${ETKV_MLX_DIR}/include)
# GNU ld looks at what libmlx itself needs.
cmake_path(GET ETKV_MLX_DIR PARENT_PATH ETKV_SITE_PACKAGES)
if(EXISTS ${ETKV_SITE_PACKAGES}/mlx_cpu.libs)
  target_link_options(
    pip::mlx INTERFACE -Wl,-rpath-link,${ETKV_SITE_PACKAGES}/mlx_cpu.libs)
endif()
