# The example runners and the test tools: C++ on ExecuTorch's Module, against
# etkv as an application would use it.

# etkv_program(NAME sources...): one executable, with the warnings of the house.
function(etkv_program name)
  add_executable(${name} ${ARGN})
  set_target_properties(
    ${name} PROPERTIES
    CXX_STANDARD 17
    CXX_STANDARD_REQUIRED ON
    CXX_EXTENSIONS OFF)
  target_compile_options(${name} PRIVATE -Wall -Wextra -Werror)
endfunction()

etkv_rust_library(etkv_text PACKAGE etkv-text LIBRARY libetkv_text${CMAKE_SHARED_LIBRARY_SUFFIX})
# Beside the other library, so that one run path serves.
add_custom_command(
  TARGET etkv_text_build POST_BUILD
  COMMAND ${CMAKE_COMMAND} -E copy_if_different
          $<TARGET_FILE:etkv_text> $<TARGET_FILE_DIR:etkv>/)

file(
  GLOB ETKV_COMMON CONFIGURE_DEPENDS
  examples/common/*.cpp examples/speculation/*.cpp)
add_library(etkv_examples_common STATIC ${ETKV_COMMON})
target_include_directories(etkv_examples_common PUBLIC ${PROJECT_SOURCE_DIR})
target_link_libraries(etkv_examples_common PUBLIC etkv::mlx_backend etkv_text)
set_target_properties(
  etkv_examples_common PROPERTIES
  CXX_STANDARD 17
  CXX_STANDARD_REQUIRED ON
  CXX_EXTENSIONS OFF)

# etkv_runner(NAME sources...)
function(etkv_runner name)
  etkv_program(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE etkv_examples_common)
endfunction()

file(GLOB ETKV_CHAT CONFIGURE_DEPENDS examples/chat/*.cpp)
etkv_runner(etkv_chat ${ETKV_CHAT})

# One file a use case.
foreach(runner admission agent_fork batch prefix rollback speculative)
  etkv_runner(etkv_${runner} examples/${runner}.cpp)
endforeach()

etkv_runner(etkv_forward tests/cpp/forward.cpp)

etkv_runner(etkv_minimal examples/minimal.cpp)
