// ExecuTorch's backend for MLX programs, on libetkv's interpreter. This file knows ExecuTorch
// and translates; what a program means is decided behind interpreter.hpp.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/core/named_data_map.h>
#include <executorch/runtime/platform/runtime.h>

#include "cpp/interpreter.hpp"
#include "etkv/etkv.h"

namespace etkv::executorch_backend {
namespace {

using ::executorch::aten::SizesType;
using ::executorch::aten::Tensor;
using ::executorch::runtime::ArrayRef;
using ::executorch::runtime::BackendExecutionContext;
using ::executorch::runtime::BackendInitContext;
using ::executorch::runtime::CompileSpec;
using ::executorch::runtime::DelegateHandle;
using ::executorch::runtime::Error;
using ::executorch::runtime::EValue;
using ::executorch::runtime::FreeableBuffer;
using ::executorch::runtime::NamedDataMap;
using ::executorch::runtime::Result;
using ::executorch::runtime::Span;
using interpreter::View;

/// ExecuTorch's code for a status of etkv.h. The sentence goes to the log, and
/// to whoever asks etkv_delegate_take_error.
Error to_executorch(etkv_status status) {
  switch (status) {
    case ETKV_OK:
      return Error::Ok;
    case ETKV_ERROR_INVALID_ARGUMENT:
    case ETKV_ERROR_POSITION:
    case ETKV_ERROR_SHAPE:
    case ETKV_ERROR_DTYPE:
      return Error::InvalidArgument;
    case ETKV_ERROR_CAPACITY:
      return Error::OutOfResources;
    case ETKV_ERROR_NO_CACHE:
      return Error::NotFound;
    case ETKV_ERROR_KIND:
      return Error::InvalidType;
    case ETKV_ERROR_PROGRAM:
      return Error::InvalidProgram;
    case ETKV_ERROR_UNSUPPORTED:
      return Error::NotSupported;
    case ETKV_ERROR_STEP:
      return Error::InvalidState;
    default:
      return Error::Internal;
  }
}

Error fail(etkv_status status, std::string_view message) {
  // The log cuts long lines, a character of several bytes maybe in the middle,
  // and ExecuTorch's Python module ends the process on a line that is no text.
  std::string line(message);
  std::replace_if(
      line.begin(),
      line.end(),
      [](char byte) { return (byte & 0x80) != 0; },
      '?');
  ET_LOG(Error, "MLXBackend: %s", line.c_str());
  etkv_private_interpreter_2()->report(status, message);
  return to_executorch(status);
}

Error check(const interpreter::Outcome& outcome) {
  return outcome.status == ETKV_OK ? Error::Ok
                                   : fail(outcome.status, outcome.message);
}

/// Constants from the program's file. Each is unmapped when the next is asked
/// for: its bytes have been copied by then.
class FileConstants final : public interpreter::Constants {
 public:
  explicit FileConstants(const NamedDataMap* data) : data_(data) {}

  bool find(std::string_view name) override {
    found_.reset();
    if (data_ == nullptr) {
      return false;
    }
    auto buffer = data_->get_data(name);
    if (!buffer.ok()) {
      return false;
    }
    found_.emplace(std::move(buffer.get()));
    return true;
  }

  View<std::uint8_t> bytes() const override {
    if (!found_ || found_->data() == nullptr) {
      return {};
    }
    return {static_cast<const std::uint8_t*>(found_->data()), found_->size()};
  }

 private:
  const NamedDataMap* data_;
  std::optional<FreeableBuffer> found_;
};

/// The delegate's arguments after its inputs.
class ArgumentOutputs final : public interpreter::Outputs {
 public:
  explicit ArgumentOutputs(Span<EValue*> outputs) : outputs_(outputs) {}

  std::int8_t scalar_type(std::size_t index) const override {
    const EValue& value = *outputs_[index];
    return value.isTensor()
               ? static_cast<std::int8_t>(value.toTensor().scalar_type())
               : 0;
  }

  std::string write(
      std::size_t index,
      View<std::int32_t> shape,
      View<std::uint8_t> bytes) override {
    EValue& value = *outputs_[index];
    if (!value.isTensor()) {
      return "output " + std::to_string(index) + " is no tensor to the host";
    }
    Tensor& tensor = value.toTensor();
    static_assert(sizeof(SizesType) == sizeof(std::int32_t));
    const auto resized = ::executorch::runtime::resize_tensor(
        tensor, ArrayRef<SizesType>(shape.data, shape.size));
    if (resized != Error::Ok || tensor.nbytes() != bytes.size) {
      return "output " + std::to_string(index) + " does not take " +
             describe(shape) + ", " + std::to_string(bytes.size) + " bytes";
    }
    if (bytes.size != 0) {
      if (tensor.mutable_data_ptr() == nullptr) {
        return "output " + std::to_string(index) + " has no memory";
      }
      std::memcpy(tensor.mutable_data_ptr(), bytes.data, bytes.size);
    }
    return {};
  }

  void write_integer(std::size_t index, std::int64_t value) override {
    *outputs_[index] = EValue(value);
  }

 private:
  static std::string describe(View<std::int32_t> shape) {
    std::string text = "shape [";
    for (std::size_t i = 0; i < shape.size; ++i) {
      text += (i == 0 ? "" : ", ") + std::to_string(shape.data[i]);
    }
    return text + "]";
  }

  Span<EValue*> outputs_;
};

/// Makes an argument for the interpreter of one of the host's.
Error read_argument(const EValue& value, interpreter::Argument& argument) {
  if (value.isInt()) {
    argument.is_tensor = false;
    argument.integer = value.toInt();
    return Error::Ok;
  }
  if (!value.isTensor()) {
    return fail(
        ETKV_ERROR_INVALID_ARGUMENT,
        "an input is neither a tensor nor an integer");
  }
  const Tensor& tensor = value.toTensor();
  // ExecuTorch gives an empty tensor strides that it does not take itself.
  if (tensor.numel() != 0 &&
      !::executorch::runtime::tensor_is_contiguous(tensor)) {
    return fail(
        ETKV_ERROR_INVALID_ARGUMENT, "an input tensor is not contiguous");
  }
  argument.is_tensor = true;
  argument.scalar_type = static_cast<std::int8_t>(tensor.scalar_type());
  static_assert(sizeof(SizesType) == sizeof(std::int32_t));
  argument.shape = {tensor.sizes().data(), tensor.sizes().size()};
  argument.bytes = {
      static_cast<const std::uint8_t*>(tensor.const_data_ptr()),
      tensor.nbytes()};
  return Error::Ok;
}

/// What ExecuTorch holds of us for one delegate.
DelegateHandle* to_handle(std::unique_ptr<interpreter::Program> program) {
  return reinterpret_cast<DelegateHandle*>(program.release());
}

interpreter::Program* to_program(DelegateHandle* handle) {
  return reinterpret_cast<interpreter::Program*>(handle);
}

/// Reads a backend option that is text; "" where it is not given.
Result<std::string> option(const BackendInitContext& context, const char* key) {
  const auto value = context.get_runtime_spec<const char*>(key);
  if (value.ok()) {
    return std::string(value.get());
  }
  if (value.error() == Error::NotFound) {
    return std::string();
  }
  return fail(
      ETKV_ERROR_INVALID_ARGUMENT,
      std::string("the option `") + key + "` is not text");
}

class MLXBackend final : public ::executorch::runtime::BackendInterface {
 public:
  bool is_available() const override {
    return true;
  }

  Result<DelegateHandle*> init(
      BackendInitContext& context,
      FreeableBuffer* processed,
      ArrayRef<CompileSpec>) const override {
    // Read fully before anything is constructed: what is made below is freed on
    // every path.
    if (processed == nullptr || processed->data() == nullptr) {
      return fail(ETKV_ERROR_PROGRAM, "the delegate has no payload");
    }
    auto program = etkv_private_interpreter_2()->new_program();
    FileConstants constants(context.get_named_data_map());
    const auto cache_key = option(context, "cache_key");
    const auto logits = option(context, "logits");
    if (!cache_key.ok() || !logits.ok()) {
      processed->Free();
      return Error::InvalidArgument;
    }
    const auto outcome = program->load(
        {static_cast<const std::uint8_t*>(processed->data()),
         processed->size()},
        constants,
        *cache_key,
        *logits);
    processed->Free();
    if (const Error error = check(outcome); error != Error::Ok) {
      return error;
    }
    return to_handle(std::move(program));
  }

  Error execute(
      BackendExecutionContext&,
      DelegateHandle* handle,
      Span<EValue*> args) const override {
    interpreter::Program& program = *to_program(handle);
    const std::size_t n_inputs = program.n_inputs();
    const std::size_t n_outputs = program.n_outputs();
    if (args.size() != n_inputs + n_outputs) {
      return fail(
          ETKV_ERROR_INVALID_ARGUMENT,
          "the program has " + std::to_string(n_inputs) + " inputs and " +
              std::to_string(n_outputs) + " outputs, " +
              std::to_string(args.size()) + " arguments are given");
    }
    std::vector<interpreter::Argument> inputs(n_inputs);
    for (std::size_t i = 0; i < n_inputs; ++i) {
      if (const Error error = read_argument(*args[i], inputs[i]);
          error != Error::Ok) {
        return error;
      }
    }
    ArgumentOutputs outputs({args.data() + n_inputs, n_outputs});
    return check(program.execute(inputs, outputs));
  }

  void destroy(DelegateHandle* handle) const override {
    delete to_program(handle);
  }
};

MLXBackend backend;

/// The delegate's own id: etkv/backend_id.hpp's kEtkvBackend.
constexpr char kOwnId[] = "EtkvForMLX";

/// Registers the backend when the library is loaded, so that nothing needs to
/// name it. An id is the first one's to register it: whether MLXBackend is ours
/// or not, the own id is.
[[maybe_unused]] const bool registered = [] {
  using ::executorch::runtime::register_backend;
  ::executorch::runtime::runtime_init();
  if (register_backend({kOwnId, &backend}) != Error::Ok) {
    ET_LOG(
        Error,
        "etkv's delegate cannot register as %s: a process has one etkv, and at "
        "most 16 backends",
        kOwnId);
    return false;
  }
  if (register_backend({"MLXBackend", &backend}) != Error::Ok) {
    ET_LOG(
        Info,
        "another backend is registered as MLXBackend; etkv::open_module and "
        "etkv.load run programs on etkv's as %s",
        kOwnId);
  }
  return true;
}();

} // namespace
} // namespace etkv::executorch_backend
