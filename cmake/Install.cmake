# `cmake --install` writes a relocatable tree with a CMake package and a pkg-config
# file.

if(SKBUILD)
  # A wheel contains only the files that Python loads.
  install(
    TARGETS etkv etkv_mlx_backend etkv_cpu_backend
    LIBRARY DESTINATION lib COMPONENT python)
  if(TARGET etkv_blas)
    install(TARGETS etkv_blas LIBRARY DESTINATION lib COMPONENT python)
  endif()
  install(FILES ${etkv_capi_tables} DESTINATION lib COMPONENT python)
  return()
endif()

include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/etkv)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/etkv DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(
  FILES ${ETKV_CARGO_TARGET_DIR}/release/libetkv_capi.a
  DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RENAME libetkv.a)
install(TARGETS etkv etkv_static EXPORT etkvTargets)
if(TARGET etkv_blas)
  install(TARGETS etkv_blas EXPORT etkvTargets)
endif()
install(EXPORT etkvTargets NAMESPACE etkv:: DESTINATION ${package_dir})
# A separate export, so that a program without ExecuTorch can load etkvTargets.
if(TARGET etkv_delegate)
  install(TARGETS etkv_delegate EXPORT etkv_delegateTargets)
  install(EXPORT etkv_delegateTargets NAMESPACE etkv:: DESTINATION ${package_dir})
endif()
foreach(backend mlx_backend cpu_backend)
  if(TARGET etkv_${backend})
    install(
      TARGETS etkv_${backend} etkv_${backend}_archive etkv_${backend}_static
      EXPORT etkv_${backend}Targets)
    install(EXPORT etkv_${backend}Targets NAMESPACE etkv:: DESTINATION ${package_dir})
  endif()
endforeach()

write_basic_package_version_file(
  ${CMAKE_CURRENT_BINARY_DIR}/etkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
configure_file(cmake/etkvConfig.cmake.in etkvConfig.cmake @ONLY)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/etkvConfig.cmake cmake/EtkvPackages.cmake
        ${CMAKE_CURRENT_BINARY_DIR}/etkvConfigVersion.cmake
  DESTINATION ${package_dir})

if(NOT ETKV_MLX)
  return()
endif()
# pkg-config cannot search for MLX, so the file has the folder of the build's MLX in a
# variable that users can override.
get_target_property(ETKV_MLX_LIBRARY etkv::mlx IMPORTED_LOCATION)
cmake_path(GET ETKV_MLX_LIBRARY PARENT_PATH ETKV_MLX_LIBDIR)
get_property(ETKV_MLX_VERSION GLOBAL PROPERTY ETKV_MLX_VERSION)
set(libdir ${CMAKE_INSTALL_LIBDIR})
string(REGEX REPLACE "[^/]+" ".." up ${libdir}/pkgconfig)
if(APPLE)
  set(ETKV_PC_MLX "-L\${mlxlibdir} -lmlx")
  set(ETKV_PC_PRIVATE "-lc++")
else()
  # As with CMake, the program itself links MLX, so that its run path applies. etkv_blas
  # exists on Linux only.
  set(ETKV_PC_BLAS "")
  if(TARGET etkv_blas)
    set(ETKV_PC_BLAS "\${libdir}/libetkv_blas.so,")
  endif()
  set(ETKV_PC_MLX "-Wl,--push-state,--no-as-needed,${ETKV_PC_BLAS}\${mlxlibdir}/libmlx.so,--pop-state")
  set(ETKV_PC_PRIVATE "-lstdc++ -ldl -lpthread -lm")
endif()
# GNU ld resolves the libraries that libmlx itself needs.
cmake_path(SET mlx_cpu_libs NORMALIZE ${ETKV_MLX_LIBDIR}/../../mlx_cpu.libs)
if(EXISTS ${mlx_cpu_libs})
  string(APPEND ETKV_PC_MLX " -Wl,-rpath-link,\${mlxlibdir}/../../mlx_cpu.libs")
endif()
configure_file(cmake/etkv.pc.in etkv.pc @ONLY)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/etkv.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
