#include "examples/common/program.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <utility>

#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::EValue;

constexpr char kForward[] = "forward";
constexpr char kEosTokenIds[] = "get_eos_ids";
constexpr char kTapLayers[] = "get_tap_layers";
constexpr char kDraftTap[] = "get_draft_tap";

/// Checks a file before it is opened, to report the reason: ExecuTorch returns
/// one code for every file that it cannot use.
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
  // A flatbuffer's identifier follows the offset of its root.
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

Result<std::unique_ptr<Module>> open_program_file(const std::string& path) {
  RETURN_IF_ERROR(check_file(path));
  auto module = std::make_unique<Module>(path, Module::LoadMode::Mmap);
  const auto code = module->load(
      executorch::runtime::Program::Verification::InternalConsistency);
  if (code != executorch::runtime::Error::Ok) {
    return damaged(path, code);
  }
  return module;
}

Result<Program> Program::open(const std::string& path, GraphCache graph_cache) {
  Program program;
  ASSIGN_OR_RETURN(program.module_, open_program_file(path));
  RETURN_IF_ERROR(program.read_facts());
  RETURN_IF_ERROR(program.read_signature());
  if (graph_cache == GraphCache::allowed && program.tells_of_no_cache()) {
    RETURN_IF_ERROR(program.read_limits());
  } else {
    ASSIGN_OR_RETURN(program.params_, read_kv_cache_metadata(*program.module_));
  }
  if (program.params_.prefill_chunk_size < 1) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "the program takes " +
            std::to_string(program.params_.prefill_chunk_size) +
            " tokens a step, not at least 1");
  }
  return program;
}

Result<void> Program::read_signature() {
  auto meta = module_->method_meta(kForward);
  if (!meta.ok()) {
    return Error(
        ETKV_ERROR_PROGRAM, "the program has no method `forward` to run");
  }
  const size_t n_inputs = draft_tap_ ? 4 : 2;
  const Error mismatch(
      ETKV_ERROR_PROGRAM,
      "the program's `forward` takes " + std::to_string(meta->num_inputs()) +
          " inputs and returns " + std::to_string(meta->num_outputs()) +
          " outputs; a language model takes input_ids and cache_position, "
          "both int64, and returns logits" +
          (draft_tap_ ? ", and a draft also takes hidden states and known, "
                        "and returns hidden states"
                      : ""));
  if (meta->num_inputs() != n_inputs || meta->num_outputs() < n_inputs / 2) {
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
  return read_hidden_states();
}

/// Reads the type of the second output, and checks that a draft reads hidden
/// states of the same type.
Result<void> Program::read_hidden_states() {
  if (tap_layers_.empty() && !draft_tap_) {
    return {};
  }
  const Error unusable(
      ETKV_ERROR_PROGRAM,
      "the program reports hidden states, but its `forward` does not return "
      "one row of them for each token");
  const auto meta = module_->method_meta(kForward);
  const auto type_of = [&](const auto& tensor) -> Result<HiddenStateType> {
    if (!tensor.ok() || tensor->sizes().size() != 3) {
      return unusable;
    }
    return examples::hidden_state_type(
        tensor->scalar_type(), tensor->sizes()[2]);
  };
  if (meta->num_outputs() < 2) {
    return unusable;
  }
  ASSIGN_OR_RETURN(const auto given, type_of(meta->output_tensor_meta(1)));
  if (draft_tap_) {
    ASSIGN_OR_RETURN(const auto taken, type_of(meta->input_tensor_meta(2)));
    ASSIGN_OR_RETURN(const auto known, type_of(meta->input_tensor_meta(3)));
    if (!(taken == given) || !(known == HiddenStateType{given.element, 1})) {
      return unusable;
    }
  }
  hidden_state_type_ = given;
  return {};
}

/// Reads the program's constant methods, except those of its caches.
Result<void> Program::read_facts() {
  ASSIGN_OR_RETURN(eos_token_ids_, read_integers(kEosTokenIds));
  ASSIGN_OR_RETURN(const auto taps, read_integers(kTapLayers));
  tap_layers_ = taps.value_or(std::vector<int64_t>());
  ASSIGN_OR_RETURN(const auto tap, read_integers(kDraftTap));
  if (tap && tap->size() != 1) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "expected one layer from the program's `get_draft_tap`");
  }
  if (tap) {
    draft_tap_ = tap->front();
  }
  return {};
}

/// Returns the integers of a constant method; nullopt if there is no such
/// method.
Result<std::optional<std::vector<int64_t>>> Program::read_integers(
    const std::string& name) {
  auto names = module_->method_names();
  if (!names.ok() || names->count(name) == 0) {
    return std::optional<std::vector<int64_t>>();
  }
  const Error unusable(
      ETKV_ERROR_PROGRAM, "the program's `" + name + "` are not integers");
  auto values = module_->execute(name);
  if (!values.ok()) {
    return unusable;
  }
  std::vector<int64_t> found;
  for (const EValue& value : *values) {
    if (value.isInt()) {
      found.push_back(value.toInt());
    } else if (
        value.isTensor() &&
        value.toTensor().scalar_type() == ScalarType::Long) {
      const auto& tensor = value.toTensor();
      const auto* data = tensor.const_data_ptr<int64_t>();
      found.insert(found.end(), data, data + tensor.numel());
    } else if (
        value.isTensor() && value.toTensor().scalar_type() == ScalarType::Int) {
      const auto& tensor = value.toTensor();
      const auto* data = tensor.const_data_ptr<int32_t>();
      found.insert(found.end(), data, data + tensor.numel());
    } else {
      return unusable;
    }
  }
  return std::optional(std::move(found));
}

/// Returns the count of a constant method; 0 if there is no such method.
Result<int32_t> Program::read_count(const std::string& name) {
  ASSIGN_OR_RETURN(const auto found, read_integers(name));
  if (!found) {
    return 0;
  }
  if (found->size() != 1 || found->front() < 0 || found->front() > INT32_MAX) {
    return Error(
        ETKV_ERROR_PROGRAM, "the program's `" + name + "` is not a count");
  }
  return static_cast<int32_t>(found->front());
}

bool Program::tells_of_no_cache() const {
  const auto names = module_->method_names();
  const auto meta = module_->method_meta(kForward);
  return names.ok() && names->count("get_n_caches") == 0 &&
         names->count("kv_cache.schema_version") == 0 && meta.ok() &&
         (meta->uses_backend(kMLXBackend) || meta->uses_backend(kEtkvBackend));
}

/// Reads the limits of a program that reports no cache.
Result<void> Program::read_limits() {
  ASSIGN_OR_RETURN(
      params_.prefill_chunk_size, read_count("get_prefill_chunk_size"));
  if (params_.prefill_chunk_size == 0) {
    const auto ids = module_->method_meta(kForward)->input_tensor_meta(0);
    const auto sizes = ids->sizes();
    params_.prefill_chunk_size = sizes.empty() ? 0 : sizes[sizes.size() - 1];
  }
  for (const char* name :
       {"get_max_ctx_len", "get_max_context_len", "get_max_seq_len"}) {
    if (params_.max_context_length == 0) {
      ASSIGN_OR_RETURN(params_.max_context_length, read_count(name));
    }
  }
  return {};
}

Result<void> Program::load(const char* cache_key, Logits rows, Passes passes) {
  LoadOptions options(cache_key);
  options.passes(passes);
  if (rows == Logits::proposed && params_.backend_id != kMLXBackend) {
    rows = Logits::all;
  }
  return load_with(options, rows);
}

Result<void> Program::load_with_graph_cache(Logits rows) {
  static std::atomic<uint64_t> n_loaded = 0;
  buffers_ = "runner " + std::to_string(n_loaded++);
  LoadOptions options(/*cache_key=*/nullptr);
  options.buffers(buffers_.c_str());
  RETURN_IF_ERROR(load_with(options, rows));
  if (!reset().ok()) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "the program has no KV cache: it does not report `get_n_caches`, and "
        "its graph keeps nothing from one step to the next");
  }
  return {};
}

Result<void> Program::reset() {
  RETURN_IF_ERROR(reset_buffers(buffers_.c_str()));
  length_ = 0;
  return {};
}

Result<void> Program::load_with(LoadOptions options, Logits rows) {
  if (module_->is_method_loaded(kForward)) {
    module_->unload_method(kForward);
  }
  hidden_states_.reset();
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
  constexpr int32_t kFew = 64;
  const int32_t most = params_.prefill_chunk_size;
  return static_cast<size_t>(
      rows_ == Logits::all || draft_tap_ ? std::min(most, kFew) : most);
}

Result<void> Program::check_tokens(const int64_t* tokens, size_t n) const {
  const auto most = static_cast<size_t>(params_.prefill_chunk_size);
  if (n < 1 || n > most) {
    return Error(
        ETKV_ERROR_INVALID_ARGUMENT,
        "a step of " + std::to_string(n) + " tokens; the program takes 1 to " +
            std::to_string(most));
  }
  return check_ids(tokens, n);
}

Result<void> Program::check_ids(const int64_t* tokens, size_t n) const {
  // An embedding does not check indices: ids of a wrong tokenizer would read
  // memory past the table.
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
  return {};
}

Result<LogitsView>
Program::step(const int64_t* tokens, const int64_t* positions, size_t n) {
  if (draft_tap_) {
    return Error(
        ETKV_ERROR_INVALID_ARGUMENT,
        "the program is a draft of a model: give it with --draft");
  }
  RETURN_IF_ERROR(check_tokens(tokens, n));
  // The tensors borrow their data, which `forward` only reads.
  const auto length = static_cast<SizesType>(n);
  const auto ids =
      from_blob(const_cast<int64_t*>(tokens), {1, length}, ScalarType::Long);
  const auto at =
      from_blob(const_cast<int64_t*>(positions), {length}, ScalarType::Long);
  // A step that fails may have written to a cache in the graph.
  length_ = static_cast<int32_t>(positions[n - 1]) + 1;
  return run({EValue(*ids), EValue(*at)}, n);
}

Result<LogitsView> Program::step(
    const int64_t* tokens,
    const int64_t* positions,
    size_t n,
    const GivenHiddenStates& given) {
  if (!draft_tap_) {
    return Error(
        ETKV_ERROR_INVALID_ARGUMENT,
        "the program has no hidden states as inputs");
  }
  RETURN_IF_ERROR(check_tokens(tokens, n));
  const HiddenStateType type = *hidden_state_type_;
  if (given.known.size() != n || given.rows.size() != n * type.bytes()) {
    return Error(
        ETKV_ERROR_SHAPE,
        std::to_string(given.rows.size()) + " bytes of hidden states for " +
            std::to_string(n) + " tokens; a row of them is " + type.describe());
  }
  const auto length = static_cast<SizesType>(n);
  const auto width = static_cast<SizesType>(type.width);
  auto known = as_elements(given.known, type.element);
  const auto ids =
      from_blob(const_cast<int64_t*>(tokens), {1, length}, ScalarType::Long);
  const auto at =
      from_blob(const_cast<int64_t*>(positions), {length}, ScalarType::Long);
  const auto rows = from_blob(
      const_cast<std::byte*>(given.rows.data()),
      {1, length, width},
      type.element);
  const auto own = from_blob(known.data(), {1, length, 1}, type.element);
  return run({EValue(*ids), EValue(*at), EValue(*rows), EValue(*own)}, n);
}

Result<LogitsView> Program::run(const std::vector<EValue>& inputs, size_t n) {
  hidden_states_.reset();
  auto outputs = execute(*module_, kForward, inputs);
  if (!outputs.ok()) {
    return outputs.error();
  }
  if (hidden_state_type_) {
    const auto& tensor = outputs.value()[1].toTensor();
    hidden_states_ = HiddenStatesView{
        static_cast<const std::byte*>(tensor.const_data_ptr()),
        *hidden_state_type_,
        static_cast<int64_t>(n)};
    if (tensor.nbytes() != n * hidden_state_type_->bytes()) {
      return Error(
          ETKV_ERROR_SHAPE,
          "the program's hidden states are " + std::to_string(tensor.nbytes()) +
              " bytes for " + std::to_string(n) + " tokens; a row of them is " +
              hidden_state_type_->describe());
    }
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
