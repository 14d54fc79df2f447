# AddressSanitizer and UndefinedBehaviorSanitizer for what is written in C++:
# libetkv's half of the delegate, the runners and the tests. Rust and MLX are as
# in the ordinary build, and Cargo's outputs are shared with it: their memory is
# watched where they allocate and free, not where they read and write.
#
#   cmake -S . -B build/sanitize -G Ninja -DETKV_SANITIZE=ON
#   cmake --build build/sanitize
#   ctest --test-dir build/sanitize --output-on-failure

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
