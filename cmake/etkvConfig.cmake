# find_package(etkv [COMPONENTS mlx_backend])
#
#   etkv::etkv, etkv::etkv_static                 always
#   etkv::mlx_backend, etkv::mlx_backend_static   with the component mlx_backend;
#       without COMPONENTS, where ExecuTorch is found
#
# EtkvPackages.cmake beside this says how MLX and ExecuTorch are found.

include(${CMAKE_CURRENT_LIST_DIR}/EtkvPackages.cmake)

set(etkv_FOUND TRUE)
foreach(etkv_component IN LISTS etkv_FIND_COMPONENTS)
  if(NOT etkv_component STREQUAL "mlx_backend" AND etkv_FIND_REQUIRED_${etkv_component})
    set(etkv_FOUND FALSE)
    set(etkv_NOT_FOUND_MESSAGE
        "etkv has no component `${etkv_component}`; there is `mlx_backend`.")
    return()
  endif()
endforeach()

etkv_find_mlx(etkv_problem)
if(etkv_problem)
  set(etkv_FOUND FALSE)
  set(etkv_NOT_FOUND_MESSAGE "${etkv_problem}")
  return()
endif()
include(${CMAKE_CURRENT_LIST_DIR}/etkvTargets.cmake)

set(etkv_mlx_backend_FOUND FALSE)
if(NOT etkv_FIND_COMPONENTS OR "mlx_backend" IN_LIST etkv_FIND_COMPONENTS)
  if(NOT EXISTS ${CMAKE_CURRENT_LIST_DIR}/etkv_mlx_backendTargets.cmake)
    set(etkv_problem
        "This etkv was built without the delegate: build it with ETKV_BUILD_MLX_BACKEND=ON.")
  else()
    etkv_find_executorch(etkv_problem)
  endif()
  if(NOT etkv_problem)
    include(${CMAKE_CURRENT_LIST_DIR}/etkv_mlx_backendTargets.cmake)
    set(etkv_mlx_backend_FOUND TRUE)
  elseif(etkv_FIND_REQUIRED_mlx_backend)
    set(etkv_FOUND FALSE)
    set(etkv_NOT_FOUND_MESSAGE "${etkv_problem}")
  elseif(NOT etkv_FIND_QUIETLY)
    message(STATUS "etkv::mlx_backend is left out. ${etkv_problem}")
  endif()
endif()
unset(etkv_problem)
unset(etkv_component)
