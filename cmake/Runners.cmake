# The example runners and the test tools: C++ programs on ExecuTorch's Module that use
# etkv like an application.

# Half of the compile time is for ExecuTorch's headers.
option(ETKV_UNITY "Use unity builds for the examples, and precompiled headers" ON)
set(unity UNITY_BUILD ${ETKV_UNITY} UNITY_BUILD_BATCH_SIZE 8)

# etkv_program(NAME sources...): an executable with the project's warnings.
function(etkv_program name)
  add_executable(${name} ${ARGN})
  set_target_properties(
    ${name} PROPERTIES
    CXX_STANDARD 17
    CXX_STANDARD_REQUIRED ON
    CXX_EXTENSIONS OFF)
  target_compile_options(${name} PRIVATE -Wall -Wextra -Werror)
endfunction()

# The tokenizer, with a C++ interface. It exports only that interface, so that its
# copies of Rust's standard library and of cxx's runtime do not conflict with libetkv's.
etkv_rust_library(etkv_tokenizer_rust PACKAGE etkv-tokenizer LIBRARY libetkv_tokenizer.a)
add_library(etkv_tokenizer SHARED examples/tokenizer/tokenizer.cpp)
set_target_properties(
  etkv_tokenizer PROPERTIES
  CXX_STANDARD 17
  CXX_STANDARD_REQUIRED ON
  CXX_EXTENSIONS OFF)
etkv_shared(etkv_tokenizer examples/tokenizer/exports)
target_compile_options(etkv_tokenizer PRIVATE -Wall -Wextra -Werror)
target_include_directories(
  etkv_tokenizer
  PUBLIC ${PROJECT_SOURCE_DIR}
  PRIVATE ${ETKV_CARGO_TARGET_DIR}/cxxbridge)
target_link_libraries(
  etkv_tokenizer
  PRIVATE etkv_tokenizer_rust
  PUBLIC etkv)
if(NOT APPLE)
  target_link_libraries(etkv_tokenizer PRIVATE dl pthread m)
endif()
# The package's build script writes the bridge's header.
add_dependencies(etkv_tokenizer etkv_tokenizer_rust_build)

file(
  GLOB ETKV_COMMON CONFIGURE_DEPENDS
  examples/common/*.cpp examples/speculation/*.cpp)
add_library(etkv_examples_common STATIC ${ETKV_COMMON})
target_include_directories(etkv_examples_common PUBLIC ${PROJECT_SOURCE_DIR})
target_link_libraries(
  etkv_examples_common
  PUBLIC $<TARGET_NAME_IF_EXISTS:etkv::mlx_backend> etkv::cpu_backend etkv_tokenizer)
set_target_properties(
  etkv_examples_common PROPERTIES ${unity}
  CXX_STANDARD 17
  CXX_STANDARD_REQUIRED ON
  CXX_EXTENSIONS OFF)

if(ETKV_UNITY)
  target_precompile_headers(
    etkv_examples_common PRIVATE <algorithm> <string> <vector>
    ${PROJECT_SOURCE_DIR}/include/etkv/executorch.hpp)
endif()

# etkv_runner(NAME [OWN_HEADERS] sources...): OWN_HEADERS if the caller precompiles other headers.
function(etkv_runner name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "OWN_HEADERS" "" "")
  etkv_program(${name} ${arg_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE etkv_examples_common)
  if(ETKV_UNITY AND NOT arg_OWN_HEADERS)
    target_precompile_headers(${name} REUSE_FROM etkv_examples_common)
  endif()
endfunction()

file(GLOB ETKV_CHAT CONFIGURE_DEPENDS examples/chat/*.cpp)
etkv_runner(etkv_chat ${ETKV_CHAT})
set_target_properties(etkv_chat PROPERTIES ${unity})

# One file per use case.
foreach(runner admission agent_fork batch prefix rollback run speculative)
  etkv_runner(etkv_${runner} examples/${runner}.cpp)
endforeach()

etkv_runner(etkv_forward tests/cpp/forward.cpp)
etkv_program(etkv_tokenize tests/cpp/tokenize.cpp)
target_link_libraries(etkv_tokenize PRIVATE etkv_tokenizer)

etkv_runner(etkv_minimal examples/minimal.cpp)

# Benchmarks, built only for `make bench` and for their own commands: captured steps,
# steps of new lengths, two programs on two threads, steps of several sequences, and
# attention on a cache compared with MLX alone.
etkv_runner(etkv_lengths benches/lengths.cpp)
etkv_runner(etkv_captured benches/captured/main.cpp benches/captured/generated.cpp
  benches/captured/shared.cpp)
etkv_runner(etkv_two_programs benches/two_programs.cpp)
etkv_runner(etkv_sequences benches/sequences.cpp)
set(benches etkv_captured etkv_lengths etkv_two_programs etkv_sequences)
if(ETKV_MLX)
  etkv_program(etkv_op benches/op.cpp)
  target_include_directories(etkv_op PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(etkv_op PRIVATE etkv etkv::mlx)
  set_target_properties(etkv_op PROPERTIES CXX_STANDARD 20)
  list(APPEND benches etkv_op)
endif()
set_target_properties(
  ${benches} PROPERTIES
  EXCLUDE_FROM_ALL ON
  RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/benches)
add_custom_target(etkv_benches DEPENDS ${benches})
