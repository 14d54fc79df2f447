# CMake targets for libraries that Cargo builds. Cargo decides what is out of date.

find_program(ETKV_CARGO cargo HINTS $ENV{HOME}/.cargo/bin)
if(NOT ETKV_CARGO)
  message(FATAL_ERROR "etkv needs Rust, and no cargo is in PATH: install Rust from https://rustup.rs, or set ETKV_CARGO")
endif()

# One cargo command builds all packages, so that common crates are built only once, with
# the features that any package needs.
set(packages --package etkv-capi)
if(ETKV_BUILD_EXAMPLES)
  list(APPEND packages --package etkv-tokenizer)
endif()
set(ETKV_RUST_PACKAGES ${packages} CACHE STRING "The packages that Cargo builds")
mark_as_advanced(ETKV_RUST_PACKAGES)

# Default features, unless a part is disabled.
set(ETKV_RUST_FEATURES "")
if(NOT ETKV_MLX AND ETKV_BUILD_CPU_BACKEND)
  set(ETKV_RUST_FEATURES --no-default-features --features etkv-capi/delegate)
elseif(NOT ETKV_MLX)
  set(ETKV_RUST_FEATURES --no-default-features)
elseif(NOT ETKV_BUILD_MLX_BACKEND AND NOT ETKV_BUILD_CPU_BACKEND)
  set(ETKV_RUST_FEATURES --no-default-features --features etkv-capi/mlx)
endif()
if(ETKV_BUCKETS)
  list(APPEND ETKV_RUST_FEATURES --features etkv-capi/buckets)
endif()

# etkv_rust_library(TARGET PACKAGE package LIBRARY libname.a|.so)
function(etkv_rust_library target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "PACKAGE;LIBRARY" "")
  set(library ${ETKV_CARGO_TARGET_DIR}/release/${arg_LIBRARY})
  # Cargo rebuilds crates if the environment differs, so pass exactly these variables.
  set(environment ETKV_PYTHON=${ETKV_PYTHON})
  if(ETKV_MLX_DIR)
    list(APPEND environment ETKV_MLX_DIR=${ETKV_MLX_DIR})
  endif()
  if(APPLE)
    list(APPEND environment MACOSX_DEPLOYMENT_TARGET=${CMAKE_OSX_DEPLOYMENT_TARGET})
  endif()
  if(SKBUILD)
    # scikit-build-core sets the compilers that Python was built with. Unset them, so that
    # Cargo uses the same compilers as in other builds.
    list(PREPEND environment --unset=CC --unset=CXX)
  endif()
  add_custom_target(
    ${target}_build
    COMMAND
      ${CMAKE_COMMAND} -E env ${environment} ${ETKV_CARGO} build --release
      --locked ${ETKV_RUST_PACKAGES} ${ETKV_RUST_FEATURES}
      --target-dir ${ETKV_CARGO_TARGET_DIR}
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    BYPRODUCTS ${library}
    USES_TERMINAL
    COMMENT "Building ${arg_PACKAGE} with cargo")
  if(arg_LIBRARY MATCHES "\\.a$")
    add_library(${target} STATIC IMPORTED GLOBAL)
  else()
    add_library(${target} SHARED IMPORTED GLOBAL)
    set_property(TARGET ${target} PROPERTY IMPORTED_NO_SONAME ON)
  endif()
  set_target_properties(${target} PROPERTIES IMPORTED_LOCATION ${library})
  add_dependencies(${target} ${target}_build)
endfunction()
