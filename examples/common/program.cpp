#include "examples/common/program.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <utility>

namespace etkv::examples {
namespace {

using executorch::aten::ScalarType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::EValue;

constexpr char kForward[] = "forward";
constexpr char kEndIds[] = "get_eos_ids";

/// ExecuTorch answers a file that it cannot use with one code. Tells apart what
/// a person would do something different about.
Result<void> check_file(const std::string& path) {
  std::error_code code;
  const auto status = std::filesystem::status(path, code);
  if (!std::filesystem::exists(status)) {
    return Error(ETKV_ERROR_INVALID_ARGUMENT, "there is no program at " + path);
  }
  if (std::filesystem::is_directory(status)) {
    return Error(
        ETKV_ERROR_INVALID_ARGUMENT, path + " is a folder, not a .pte file");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return Error(
        ETKV_ERROR_INVALID_ARGUMENT,
        "cannot read the program " + path + ": " + std::strerror(errno));
  }
  // A flatbuffer's identifier is behind the offset of its root.
  char head[8] = {};
  file.read(head, sizeof(head));
  if (file.gcount() != sizeof(head) || std::memcmp(head + 4, "ET", 2) != 0) {
    return Error(
        ETKV_ERROR_PROGRAM, path + " is not an ExecuTorch program (.pte)");
  }
  return {};
}

Error damaged(const std::string& path, executorch::runtime::Error code) {
  std::error_code ignored;
  return Error(
      ETKV_ERROR_PROGRAM,
      "the program " + path + " is truncated or damaged (" +
          std::to_string(std::filesystem::file_size(path, ignored)) +
          " bytes, " + executorch::runtime::to_string(code) + ")");
}

const char* format_of(ScalarType type) {
  switch (type) {
    case ScalarType::Half:
      return "f16";
    case ScalarType::BFloat16:
      return "bf16";
    default:
      return "f32";
  }
}

} // namespace

Result<Program> Program::open(const std::string& path) {
  if (auto checked = check_file(path); !checked.ok()) {
    return checked.error();
  }
  Program program;
  program.module_ = std::make_unique<Module>(path, Module::LoadMode::Mmap);
  const auto code = program.module_->load(
      executorch::runtime::Program::Verification::InternalConsistency);
  if (code != executorch::runtime::Error::Ok) {
    return damaged(path, code);
  }
  if (auto read = program.read_signature(); !read.ok()) {
    return read.error();
  }
  auto params = read_kv_cache_metadata(*program.module_);
  if (!params.ok()) {
    return params.error();
  }
  program.params_ = std::move(params.value());
  if (program.params_.prefill_chunk_size < 1) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "the program takes " +
            std::to_string(program.params_.prefill_chunk_size) +
            " tokens a step, not at least 1");
  }
  if (auto read = program.read_end_ids(); !read.ok()) {
    return read.error();
  }
  return program;
}

Result<void> Program::read_signature() {
  auto meta = module_->method_meta(kForward);
  if (!meta.ok()) {
    return Error(
        ETKV_ERROR_PROGRAM, "the program has no method `forward` to run");
  }
  const Error mismatch(
      ETKV_ERROR_PROGRAM,
      "the program's `forward` takes " + std::to_string(meta->num_inputs()) +
          " inputs and returns " + std::to_string(meta->num_outputs()) +
          " outputs; a language model takes input_ids and cache_position, "
          "both int64, and returns logits");
  if (meta->num_inputs() != 2 || meta->num_outputs() < 1) {
    return mismatch;
  }
  for (size_t i = 0; i < 2; ++i) {
    auto input = meta->input_tensor_meta(i);
    if (!input.ok() || input->scalar_type() != ScalarType::Long) {
      return mismatch;
    }
  }
  auto output = meta->output_tensor_meta(0);
  if (!output.ok() || output->sizes().empty()) {
    return mismatch;
  }
  vocabulary_ = output->sizes()[output->sizes().size() - 1];
  native_format_ = format_of(output->scalar_type());
  return {};
}

Result<void> Program::read_end_ids() {
  auto names = module_->method_names();
  if (!names.ok() || names->count(kEndIds) == 0) {
    return {};
  }
  const Error unusable(
      ETKV_ERROR_PROGRAM, "the program's `get_eos_ids` are not integers");
  auto values = module_->execute(kEndIds);
  if (!values.ok()) {
    return unusable;
  }
  std::vector<int64_t> ids;
  for (const EValue& value : *values) {
    if (value.isInt()) {
      ids.push_back(value.toInt());
    } else if (
        value.isTensor() &&
        value.toTensor().scalar_type() == ScalarType::Long) {
      const auto& tensor = value.toTensor();
      const auto* data = tensor.const_data_ptr<int64_t>();
      ids.insert(ids.end(), data, data + tensor.numel());
    } else if (
        value.isTensor() && value.toTensor().scalar_type() == ScalarType::Int) {
      const auto& tensor = value.toTensor();
      const auto* data = tensor.const_data_ptr<int32_t>();
      ids.insert(ids.end(), data, data + tensor.numel());
    } else {
      return unusable;
    }
  }
  end_ids_ = std::move(ids);
  return {};
}

Result<void> Program::load(const char* cache_key, Logits rows) {
  if (module_->is_method_loaded(kForward)) {
    module_->unload_method(kForward);
  }
  LoadOptions options(cache_key);
  options.logits(rows);
  rows_ = rows;
  auto loaded = load_method(*module_, kForward, options);
  if (loaded.ok() || rows == Logits::all ||
      loaded.error().status() != ETKV_ERROR_UNSUPPORTED) {
    return loaded;
  }
  rows_ = Logits::all;
  options.logits(rows_);
  return load_method(*module_, kForward, options);
}

size_t Program::prefill_size() const {
  constexpr int32_t kRows = 64;
  const int32_t most = params_.prefill_chunk_size;
  return static_cast<size_t>(
      rows_ == Logits::last ? most : std::min(most, kRows));
}

Result<LogitsView>
Program::step(const int64_t* tokens, const int64_t* positions, size_t n) {
  const auto most = static_cast<size_t>(params_.prefill_chunk_size);
  if (n < 1 || n > most) {
    return Error(
        ETKV_ERROR_INVALID_ARGUMENT,
        "a step of " + std::to_string(n) + " tokens; the program takes 1 to " +
            std::to_string(most));
  }
  // An embedding does not check its index: a foreign tokenizer would read
  // whatever is behind the table.
  const auto* stray = std::find_if(tokens, tokens + n, [this](int64_t token) {
    return token < 0 || token >= vocabulary_;
  });
  if (stray != tokens + n) {
    return Error(
        ETKV_ERROR_INVALID_ARGUMENT,
        "token " + std::to_string(*stray) +
            " is outside the model's vocabulary of " +
            std::to_string(vocabulary_));
  }

  // The tensors borrow their data, which `forward` only reads.
  const auto length = static_cast<executorch::aten::SizesType>(n);
  const auto ids =
      from_blob(const_cast<int64_t*>(tokens), {1, length}, ScalarType::Long);
  const auto at =
      from_blob(const_cast<int64_t*>(positions), {length}, ScalarType::Long);
  auto outputs = execute(*module_, kForward, {EValue(*ids), EValue(*at)});
  if (!outputs.ok()) {
    return outputs.error();
  }
  return view_logits(outputs->front().toTensor());
}

Result<LogitsView>
Program::step_at(const int64_t* tokens, int64_t position, size_t n) {
  positions_.resize(n);
  std::iota(positions_.begin(), positions_.end(), position);
  return step(tokens, positions_.data(), n);
}

Result<std::optional<LogitsView>> prefill(
    Program& program,
    const int64_t* tokens,
    int64_t position,
    size_t n,
    size_t chunk,
    const OnChunk& on_chunk) {
  const auto most = static_cast<size_t>(program.params().prefill_chunk_size);
  const size_t size =
      chunk == 0 ? program.prefill_size() : std::min(chunk, most);
  std::optional<LogitsView> last;
  for (size_t done = 0; done < n;) {
    const size_t take = std::min(size, n - done);
    auto logits = program.step_at(
        tokens + done, position + static_cast<int64_t>(done), take);
    if (!logits.ok()) {
      return logits.error();
    }
    done += take;
    if (on_chunk && !on_chunk(done, n, *logits)) {
      return std::optional<LogitsView>();
    }
    last = *logits;
  }
  return last;
}

} // namespace etkv::examples
