# AddressSanitizer and UndefinedBehaviorSanitizer for what is written in C++: the
# delegate, libetkv's side of it, the runners and the tests. Rust and MLX are as
# in the ordinary build, and Cargo's outputs are shared with it: their memory is
# watched where they allocate and free, not where they read and write.
#
# `make test-sanitize` builds it in build/sanitize and runs the tests.

add_compile_options(
  -fsanitize=address,undefined -fno-sanitize-recover=all
  -fno-omit-frame-pointer -g)
add_link_options(-fsanitize=address,undefined)

# Beside the ordinary build's, which go to ../lib and ../bin.
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)

set(ETKV_TEST_ENVIRONMENT
    "ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1"
    "UBSAN_OPTIONS=print_stacktrace=1")
