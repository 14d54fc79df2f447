# Cargo's libraries as CMake targets. Cargo decides what is out of date.

find_program(ETKV_CARGO cargo HINTS $ENV{HOME}/.cargo/bin REQUIRED)
cmake_path(SET ETKV_CARGO_TARGET NORMALIZE ${CMAKE_BINARY_DIR}/../cargo)

# etkv_rust_library(TARGET PACKAGE package LIBRARY libname.a|.so)
function(etkv_rust_library target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "PACKAGE;LIBRARY" "")
  set(library ${ETKV_CARGO_TARGET}/release/${arg_LIBRARY})
  add_custom_target(
    ${target}_build
    COMMAND
      ${CMAKE_COMMAND} -E env ETKV_PYTHON=${ETKV_PYTHON} ${ETKV_CARGO} build
      --release --locked --package ${arg_PACKAGE} --target-dir ${ETKV_CARGO_TARGET}
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    BYPRODUCTS ${library}
    USES_TERMINAL
    COMMENT "Building ${arg_PACKAGE} with cargo")
  if(arg_LIBRARY MATCHES "\\.a$")
    add_library(${target} STATIC IMPORTED GLOBAL)
    if(NOT APPLE)
      target_link_libraries(${target} INTERFACE dl pthread m)
    endif()
  else()
    add_library(${target} SHARED IMPORTED GLOBAL)
    set_property(TARGET ${target} PROPERTY IMPORTED_NO_SONAME ON)
  endif()
  set_target_properties(${target} PROPERTIES IMPORTED_LOCATION ${library})
  add_dependencies(${target} ${target}_build)
endfunction()
