// MLXBackend of ExecuTorch, on the interpreter in Rust. This file knows
// ExecuTorch and translates; what a program means is decided behind the bridge.
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/core/named_data_map.h>

#include "cpp/bridge_types.hpp"
#include "etkv/etkv.h"
#include "etkv/src/bridge.rs.h"

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

Error fail(etkv_status status, rust::Str message) {
  ET_LOG(
      Error,
      "MLXBackend: %.*s",
      static_cast<int>(message.size()),
      message.data());
  bridge::report(status, message);
  return to_executorch(status);
}

Error check(const bridge::Outcome& outcome) {
  return outcome.status == ETKV_OK ? Error::Ok
                                   : fail(outcome.status, outcome.message);
}

/// Constants from the program's file. Each is unmapped when the next is asked
/// for: its bytes have been copied by then.
class FileConstants final : public bridge::Constants {
 public:
  explicit FileConstants(const NamedDataMap* data) : data_(data) {}

  bool find(rust::Str name) override {
    found_.reset();
    if (data_ == nullptr) {
      return false;
    }
    auto buffer = data_->get_data(std::string_view(name.data(), name.size()));
    if (!buffer.ok()) {
      return false;
    }
    found_.emplace(std::move(buffer.get()));
    return true;
  }

  rust::Slice<const std::uint8_t> bytes() const override {
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
class ArgumentOutputs final : public bridge::Outputs {
 public:
  explicit ArgumentOutputs(Span<EValue*> outputs) : outputs_(outputs) {}

  std::int8_t scalar_type(std::size_t index) const override {
    const EValue& value = *outputs_[index];
    return value.isTensor()
               ? static_cast<std::int8_t>(value.toTensor().scalar_type())
               : 0;
  }

  rust::String write(
      std::size_t index,
      rust::Slice<const std::int32_t> shape,
      rust::Slice<const std::uint8_t> bytes) override {
    EValue& value = *outputs_[index];
    if (!value.isTensor()) {
      return "output " + std::to_string(index) + " is no tensor to the host";
    }
    Tensor& tensor = value.toTensor();
    static_assert(sizeof(SizesType) == sizeof(std::int32_t));
    const auto resized = ::executorch::runtime::resize_tensor(
        tensor, ArrayRef<SizesType>(shape.data(), shape.size()));
    if (resized != Error::Ok || tensor.nbytes() != bytes.size()) {
      return "output " + std::to_string(index) + " does not take " +
             describe(shape) + ", " + std::to_string(bytes.size()) + " bytes";
    }
    if (!bytes.empty()) {
      if (tensor.mutable_data_ptr() == nullptr) {
        return "output " + std::to_string(index) + " has no memory";
      }
      std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
    }
    return {};
  }

  void write_integer(std::size_t index, std::int64_t value) override {
    *outputs_[index] = EValue(value);
  }

 private:
  static std::string describe(rust::Slice<const std::int32_t> shape) {
    std::string text = "shape [";
    for (std::size_t i = 0; i < shape.size(); ++i) {
      text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
    }
    return text + "]";
  }

  Span<EValue*> outputs_;
};

/// Makes a bridge argument of one of the host's.
Error read_argument(const EValue& value, bridge::Argument& argument) {
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
  argument.shape.reserve(tensor.dim());
  for (const auto size : tensor.sizes()) {
    argument.shape.push_back(static_cast<std::int32_t>(size));
  }
  argument.data = static_cast<const std::uint8_t*>(tensor.const_data_ptr());
  argument.n_bytes = tensor.nbytes();
  return Error::Ok;
}

/// What ExecuTorch holds of us for one delegate.
struct Handle {
  rust::Box<bridge::Delegate> delegate = bridge::new_delegate();
};

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
    auto handle = std::make_unique<Handle>();
    FileConstants constants(context.get_named_data_map());
    const auto cache_key = option(context, "cache_key");
    const auto logits = option(context, "logits");
    if (!cache_key.ok() || !logits.ok()) {
      processed->Free();
      return Error::InvalidArgument;
    }
    const auto outcome = handle->delegate->load(
        {static_cast<const std::uint8_t*>(processed->data()),
         processed->size()},
        constants,
        *cache_key,
        *logits);
    processed->Free();
    if (const Error error = check(outcome); error != Error::Ok) {
      return error;
    }
    return reinterpret_cast<DelegateHandle*>(handle.release());
  }

  Error execute(
      BackendExecutionContext&,
      DelegateHandle* raw,
      Span<EValue*> args) const override {
    bridge::Delegate& delegate = *reinterpret_cast<Handle*>(raw)->delegate;
    const std::size_t n_inputs = delegate.n_inputs();
    const std::size_t n_outputs = delegate.n_outputs();
    if (args.size() != n_inputs + n_outputs) {
      return fail(
          ETKV_ERROR_INVALID_ARGUMENT,
          "the program has " + std::to_string(n_inputs) + " inputs and " +
              std::to_string(n_outputs) + " outputs, " +
              std::to_string(args.size()) + " arguments are given");
    }
    std::vector<bridge::Argument> inputs(n_inputs);
    for (std::size_t i = 0; i < n_inputs; ++i) {
      if (const Error error = read_argument(*args[i], inputs[i]);
          error != Error::Ok) {
        return error;
      }
    }
    ArgumentOutputs outputs({args.data() + n_inputs, n_outputs});
    return check(delegate.execute({inputs.data(), inputs.size()}, outputs));
  }

  void destroy(DelegateHandle* raw) const override {
    delete reinterpret_cast<Handle*>(raw);
  }
};

MLXBackend backend;

/// Registers the backend when the library is loaded, so that nothing needs to
/// name it.
[[maybe_unused]] const Error registered =
    ::executorch::runtime::register_backend({"MLXBackend", &backend});

} // namespace
} // namespace etkv::executorch_backend
