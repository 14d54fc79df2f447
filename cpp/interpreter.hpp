// What libetkv_mlx_backend asks of libetkv, and what it answers in return.
//
// Private to the two, which are built together. It is one C symbol and virtual
// calls, so that nothing of cxx's runtime is exported: a program that has Rust
// of its own would put its copy in the place of ours.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "etkv/etkv.h"

namespace etkv::interpreter {

/// Elements that somebody else owns.
template <typename T>
struct View {
  const T* data = nullptr;
  std::size_t size = 0;
};

/// How a call went: ETKV_OK, or a status and a sentence.
struct Outcome {
  etkv_status status = ETKV_OK;
  std::string message;
};

/// An argument of a program, an input or an output: a contiguous tensor, or an
/// integer. Crosses to Rust as it is: src/program/argument.rs has the same fields.
struct Argument {
  /// Of a tensor: its elements, row-major.
  const std::uint8_t* data = nullptr;
  std::size_t n_bytes = 0;
  const std::int32_t* shape = nullptr;
  std::size_t rank = 0;
  /// Of an integer.
  std::int64_t integer = 0;
  /// Of a tensor: ExecuTorch's number of its dtype.
  std::int8_t scalar_type = 0;
  bool is_tensor = false;
};

/// A program's constants, by name.
class Constants {
 public:
  virtual ~Constants() = default;
  /// Finds a constant and keeps it mapped until the next call.
  virtual bool find(std::string_view name) = 0;
  /// The bytes of what was found last.
  virtual View<std::uint8_t> bytes() const = 0;
};

/// Who runs a program.
class Host {
 public:
  virtual ~Host() = default;
  /// Takes the outputs of a run, in order, which are valid for the call; "" if it
  /// could.
  virtual std::string take(View<Argument> outputs) = 0;
};

/// One delegate of a loaded method; empty until it is loaded.
class Program {
 public:
  virtual ~Program() = default;
  /// Decodes a payload, copies its constants and binds the cache. Empty
  /// `cache_key` and `logits` stand for none.
  virtual Outcome load(
      View<std::uint8_t> payload,
      Constants& constants,
      std::string_view cache_key,
      std::string_view logits) = 0;
  /// Runs the program on its inputs and hands the outputs to `host`, in the dtypes
  /// of these ExecuTorch numbers.
  virtual Outcome execute(
      View<Argument> inputs,
      View<std::int8_t> output_types,
      Host& host) = 0;
  /// How many there are, of a program that is loaded.
  virtual std::size_t n_inputs() const = 0;
  virtual std::size_t n_outputs() const = 0;
};

/// The interpreter of programs, with the process's registry of caches.
class Interpreter {
 public:
  virtual ~Interpreter() = default;
  virtual std::unique_ptr<Program> new_program() const = 0;
  /// Keeps an error for etkv_delegate_take_error on this thread.
  virtual void report(etkv_status status, std::string_view message) const = 0;
};

} // namespace etkv::interpreter

/// libetkv's interpreter, never null: a pointer, because a function with C linkage
/// cannot give a reference. The name's number is that of the classes above: any
/// change to them changes it, so that libraries of two builds do not load.
extern "C" ETKV_API const etkv::interpreter::Interpreter*
etkv_private_interpreter_3();
