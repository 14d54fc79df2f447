// Translates between ExecuTorch and interpreter.hpp. The interpreter runs the
// programs.
#include "cpp/delegate.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/core/named_data_map.h>
#include <executorch/runtime/platform/runtime.h>

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

const interpreter::Interpreter& libetkv() {
  return *etkv_private_interpreter_7();
}

/// Returns ExecuTorch's code for a status of etkv.h. The message goes to the
/// log, and etkv_delegate_take_error returns it.
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
    case ETKV_ERROR_VERSION:
      return Error::DelegateInvalidCompatibility;
    default:
      return Error::Internal;
  }
}

/// Logs an error of `backend` and keeps it for the caller.
Error fail(const char* backend, etkv_status status, std::string_view message) {
  // The log cuts long lines, perhaps inside a multi-byte character.
  // ExecuTorch's Python module ends the process on a line that is not UTF-8.
  std::string line(message);
  std::replace_if(
      line.begin(),
      line.end(),
      [](char byte) { return (byte & 0x80) != 0; },
      '?');
  ET_LOG(Error, "%s: %s", backend, line.c_str());
  libetkv().report(status, message);
  // MLX throws one exception type for every failure. If memory runs out, the
  // message of the exception contains "Unable to allocate" or "Attempting to
  // allocate".
  if (status == ETKV_ERROR_BACKEND &&
      message.find("llocate") != std::string_view::npos) {
    return Error::MemoryAllocationFailed;
  }
  return to_executorch(status);
}

Error check(const char* backend, const interpreter::Outcome& outcome) {
  return outcome.status == ETKV_OK
             ? Error::Ok
             : fail(backend, outcome.status, outcome.message);
}

/// Constants from the program's file. Each is unmapped when the next one is
/// requested, because the interpreter has copied its bytes by then.
class FileConstants final : public interpreter::Constants {
 public:
  explicit FileConstants(const NamedDataMap* data) : data_(data) {}

  bool find(const char* name, std::size_t size) override {
    found_.reset();
    if (data_ == nullptr) {
      return false;
    }
    auto buffer = data_->get_data({name, size});
    if (!buffer.ok()) {
      return false;
    }
    found_.emplace(std::move(buffer.get()));
    return true;
  }

  const std::uint8_t* data() const override {
    return found_ ? static_cast<const std::uint8_t*>(found_->data()) : nullptr;
  }
  std::size_t size() const override {
    return found_ ? found_->size() : 0;
  }

 private:
  const NamedDataMap* data_;
  std::optional<FreeableBuffer> found_;
};

/// The outputs of a delegate: the arguments after its inputs.
class OutputArguments final : public interpreter::Host {
 public:
  explicit OutputArguments(Span<EValue*> outputs) : outputs_(outputs) {}

  std::uint8_t* place(
      std::size_t i,
      const std::int32_t* shape,
      std::size_t rank,
      std::size_t n_bytes) override {
    if (i >= outputs_.size() || !outputs_[i]->isTensor()) {
      return refuse(i, "expected a tensor to write to, the host has none");
    }
    Tensor& tensor = outputs_[i]->toTensor();
    static_assert(sizeof(SizesType) == sizeof(std::int32_t));
    const auto resized = ::executorch::runtime::resize_tensor(
        tensor, ArrayRef<SizesType>(shape, rank));
    if (resized != Error::Ok || tensor.nbytes() != n_bytes) {
      return refuse(
          i,
          "the host's tensor cannot have shape " + describe(shape, rank) +
              ", " + std::to_string(n_bytes) + " bytes");
    }
    if (n_bytes == 0) {
      // Nothing is written; a non-null address means that the shape fits.
      return reinterpret_cast<std::uint8_t*>(this);
    }
    auto* const memory = static_cast<std::uint8_t*>(tensor.mutable_data_ptr());
    return memory != nullptr
               ? memory
               : refuse(i, "expected a tensor with memory to write to");
  }

  bool set_integer(std::size_t i, std::int64_t value) override {
    if (i >= outputs_.size()) {
      refuse(i, "expected an output to set, the host has none");
      return false;
    }
    *outputs_[i] = EValue(value);
    return true;
  }

  const std::string& refusal() const override {
    return refusal_;
  }

 private:
  std::uint8_t* refuse(std::size_t i, const std::string& why) {
    refusal_ = "output " + std::to_string(i) + ": " + why;
    return nullptr;
  }

  static std::string describe(const std::int32_t* shape, std::size_t rank) {
    std::string text = "[";
    for (std::size_t i = 0; i < rank; ++i) {
      text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
    }
    return text + "]";
  }

  Span<EValue*> outputs_;
  std::string refusal_;
};

/// Converts an argument of the host to one of the interpreter. Returns nullptr,
/// or the reason that the argument is refused.
const char* read_argument(
    const EValue& value,
    interpreter::Argument& argument) {
  if (value.isInt()) {
    argument = {};
    argument.integer = value.toInt();
    return nullptr;
  }
  if (!value.isTensor()) {
    return "expected an input that is a tensor or an integer";
  }
  const Tensor& tensor = value.toTensor();
  // Empty tensors are skipped: ExecuTorch sets strides for them that its own
  // check refuses.
  if (tensor.numel() != 0 &&
      !::executorch::runtime::tensor_is_contiguous(tensor)) {
    return "expected a contiguous input tensor";
  }
  const void* data = tensor.const_data_ptr();
  if (data == nullptr && tensor.nbytes() != 0) {
    return "expected an input tensor with data, got a null pointer";
  }
  static_assert(sizeof(SizesType) == sizeof(std::int32_t));
  argument.data = static_cast<const std::uint8_t*>(data);
  argument.n_bytes = tensor.nbytes();
  argument.shape = tensor.sizes().data();
  argument.rank = tensor.sizes().size();
  argument.scalar_type = static_cast<std::int8_t>(tensor.scalar_type());
  argument.is_tensor = true;
  return nullptr;
}

/// The object to which ExecuTorch's handle of one delegate points: the program,
/// and room for the arguments of a run.
struct Delegate {
  std::unique_ptr<interpreter::Program> program;
  std::vector<interpreter::Argument> inputs;
  std::vector<std::int8_t> output_types;
};

Delegate& to_delegate(DelegateHandle* handle) {
  return *reinterpret_cast<Delegate*>(handle);
}

/// Reads a backend option that is text; "" if it is absent.
Result<std::string> option(
    const char* backend,
    const BackendInitContext& context,
    const char* key) {
  const auto value = context.get_runtime_spec<const char*>(key);
  if (value.ok()) {
    return std::string(value.get());
  }
  if (value.error() == Error::NotFound) {
    return std::string();
  }
  return fail(
      backend,
      ETKV_ERROR_INVALID_ARGUMENT,
      std::string("the option `") + key + "` is not text");
}

} // namespace

bool Backend::register_own(const char* id) {
  ::executorch::runtime::runtime_init();
  if (::executorch::runtime::register_backend({id, this}) == Error::Ok) {
    return true;
  }
  ET_LOG(
      Error,
      "etkv's delegate cannot register as %s: a process has one etkv, and at "
      "most 16 backends",
      id);
  return false;
}

Result<DelegateHandle*> Backend::init(
    BackendInitContext& context,
    FreeableBuffer* processed,
    ArrayRef<CompileSpec>) const {
  // The delegate is constructed last, so that a return on an error leaves
  // nothing to free except the payload.
  if (processed == nullptr || processed->data() == nullptr) {
    return fail(
        name_,
        ETKV_ERROR_PROGRAM,
        "expected a payload of the delegate, got none");
  }
  auto program = libetkv().new_program(target_);
  FileConstants constants(context.get_named_data_map());
  const auto cache_key = option(name_, context, "cache_key");
  const auto logits = option(name_, context, "logits");
  const auto passes = option(name_, context, "passes");
  const auto buffers = option(name_, context, "buffers");
  if (!cache_key.ok() || !logits.ok() || !passes.ok() || !buffers.ok()) {
    processed->Free();
    return Error::InvalidArgument;
  }
  const auto outcome = program->load(
      {static_cast<const std::uint8_t*>(processed->data()), processed->size()},
      constants,
      *cache_key,
      *logits,
      *passes,
      *buffers);
  processed->Free();
  if (const Error error = check(name_, outcome); error != Error::Ok) {
    return error;
  }
  auto delegate = std::make_unique<Delegate>();
  delegate->inputs.resize(program->n_inputs());
  delegate->output_types.resize(program->n_outputs());
  delegate->program = std::move(program);
  return reinterpret_cast<DelegateHandle*>(delegate.release());
}

Error Backend::execute(
    BackendExecutionContext&,
    DelegateHandle* handle,
    Span<EValue*> args) const {
  Delegate& delegate = to_delegate(handle);
  const std::size_t n_inputs = delegate.inputs.size();
  const std::size_t n_outputs = delegate.output_types.size();
  if (args.size() != n_inputs + n_outputs) {
    return fail(
        name_,
        ETKV_ERROR_INVALID_ARGUMENT,
        "expected " + std::to_string(n_inputs) + " inputs and " +
            std::to_string(n_outputs) + " outputs, got " +
            std::to_string(args.size()) + " arguments");
  }
  for (std::size_t i = 0; i < n_inputs; ++i) {
    if (const char* wrong = read_argument(*args[i], delegate.inputs[i])) {
      return fail(name_, ETKV_ERROR_INVALID_ARGUMENT, wrong);
    }
  }
  for (std::size_t i = 0; i < n_outputs; ++i) {
    const EValue& value = *args[n_inputs + i];
    delegate.output_types[i] =
        value.isTensor()
            ? static_cast<std::int8_t>(value.toTensor().scalar_type())
            : 0;
  }
  OutputArguments outputs({args.data() + n_inputs, n_outputs});
  return check(
      name_,
      delegate.program->execute(
          {delegate.inputs.data(), n_inputs},
          {delegate.output_types.data(), n_outputs},
          outputs,
          threads_));
}

void Backend::destroy(DelegateHandle* handle) const {
  delete &to_delegate(handle);
}

} // namespace etkv::executorch_backend
