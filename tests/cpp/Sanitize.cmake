# AddressSanitizer and UndefinedBehaviorSanitizer for the C++ code: the delegate, libetkv's side of it, the runners
# and the tests. Rust and MLX are built as usual, and Cargo's outputs are shared with the ordinary build. The
# sanitizers see the allocations of Rust and MLX, but not their reads and writes.
#
# `make test-sanitize` builds the code in build/sanitize and runs the tests.

add_compile_options(
  -fsanitize=address,undefined -fno-sanitize-recover=all
  -fno-omit-frame-pointer -g)
add_link_options(-fsanitize=address,undefined)

# Separate from the ordinary build's outputs, which go to ../lib and ../bin.
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)

set(ETKV_TEST_ENVIRONMENT
    "ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1"
    "UBSAN_OPTIONS=print_stacktrace=1")
