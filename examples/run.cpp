// etkv_run: calls a method once, with tensors from a file as inputs, and writes
// the outputs to another file. For programs that are not language models, and
// for tests of operations.

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/arguments.hpp"
#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/log.hpp"
#include "examples/common/model.hpp"
#include "examples/common/program.hpp"
#include "examples/common/runner.hpp"
#include "examples/common/tensor_file.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

using executorch::aten::ArrayRef;
using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::EValue;
using executorch::runtime::MethodMeta;
using executorch::runtime::Tag;

struct Options {
  std::optional<std::string> pte;
  std::optional<std::string> input;
  std::optional<std::string> output;
  std::optional<std::string> kv_cache;
  std::optional<std::string> method;
  bool help = false;
  bool version = false;
};

Arguments arguments_into(Options& options) {
  Arguments arguments(
      "usage: etkv_run --pte MODEL.pte --input FILE --output FILE [options]\n"
      "Runs one method of a program once. Prints a line for each output.\n");
  arguments.text("--pte", "FILE", "the program (.pte)", &options.pte);
  arguments.text(
      "--input",
      "FILE",
      "the inputs: a file of tensors, in the order of the\n"
      "method. An integer is an i64 tensor of rank 0",
      &options.input);
  arguments.text(
      "--output",
      "FILE",
      "the file for the outputs, in the same format",
      &options.output);
  arguments.text(
      "--kv-cache",
      "SIZES",
      "run with a KV cache of these sizes: capacity,\n"
      "n_layers,n_kv_heads,head_dim[,dtype]. The dtype is a\n"
      "storage format, or ExecuTorch's number of a dtype: 5\n"
      "(f16), 6 (f32, the default) or 15 (bf16)",
      &options.kv_cache);
  arguments.text("--method", "NAME", "the method (forward)", &options.method);
  arguments.flag("--help", "print this and exit", &options.help);
  arguments.flag("--version", "print the versions and exit", &options.version);
  return arguments;
}

/// Returns the storage format for the last part of `--kv-cache`.
std::string format_of(const std::string& dtype) {
  return dtype == "5"    ? "f16"
         : dtype == "6"  ? "f32"
         : dtype == "15" ? "bf16"
                         : dtype;
}

Result<CacheConfig> cache_config(const std::string& sizes) {
  constexpr const char* kNames[] = {
      "capacity", "n_layers", "n_kv_heads", "head_dim"};
  constexpr int32_t kMaxLayers = 65536;
  std::vector<std::string> parts(1);
  for (const char letter : sizes) {
    if (letter == ',') {
      parts.emplace_back();
    } else {
      parts.back() += letter;
    }
  }
  if (parts.size() < 4 || parts.size() > 5) {
    return refuse(
        "--kv-cache takes capacity,n_layers,n_kv_heads,head_dim[,dtype], not " +
        counted(static_cast<int64_t>(parts.size()), "part") + " in \"" + sizes +
        "\"");
  }
  int32_t numbers[4] = {};
  for (size_t i = 0; i < 4; ++i) {
    const int32_t most =
        i == 1 ? kMaxLayers : std::numeric_limits<int32_t>::max();
    const char* end = parts[i].data() + parts[i].size();
    const auto [stop, code] = std::from_chars(parts[i].data(), end, numbers[i]);
    if (code != std::errc() || stop != end || numbers[i] < 1 ||
        numbers[i] > most) {
      return refuse(
          std::string("the ") + kNames[i] +
          " of --kv-cache is a whole number from 1 to " + std::to_string(most) +
          ", not \"" + parts[i] + "\"");
    }
  }
  CacheConfig config;
  config.capacity = numbers[0];
  config.layers.assign(
      static_cast<size_t>(numbers[1]),
      LayerConfig{numbers[2], numbers[3], numbers[3]});
  config.k_format = parts.size() == 5 ? format_of(parts[4]) : "f32";
  config.v_format = config.k_format;
  return config;
}

/// The inputs of a method, and the tensors to which they point.
struct Inputs {
  std::vector<EValue> values;
  std::vector<executorch::extension::TensorPtr> tensors;
};

/// Returns the inputs of the method; the inputs point into `tensors`. Checks
/// the tensors, because ExecuTorch returns the same code for every mismatch.
Result<Inputs> inputs_from(
    std::vector<FileTensor>& tensors,
    const MethodMeta& meta,
    const std::string& method) {
  if (tensors.size() != meta.num_inputs()) {
    return refuse(
        "the method " + method + " takes " +
        counted(static_cast<int64_t>(meta.num_inputs()), "input") +
        ", --input has " +
        counted(static_cast<int64_t>(tensors.size()), "tensor"));
  }
  Inputs inputs;
  for (size_t i = 0; i < tensors.size(); ++i) {
    FileTensor& tensor = tensors[i];
    const ArrayRef<SizesType> sizes(tensor.sizes.data(), tensor.sizes.size());
    const auto mismatch = [&](const std::string& expected) {
      return refuse(
          "input " + std::to_string(i) + " of the method " + method + " is " +
          expected + ", --input has " + tensor_text(tensor.type, sizes));
    };
    const auto tag = meta.input_tag(i);
    if (tag.ok() && *tag == Tag::None) {
      // ExecuTorch 1.5 writes this tag for a dynamic integer.
      return mismatch("without a type in the program, and takes no value");
    }
    if (tag.ok() && *tag == Tag::Int) {
      if (tensor.type != ScalarType::Long || !tensor.sizes.empty()) {
        return mismatch("an integer, i64 []");
      }
      int64_t value = 0;
      std::memcpy(&value, tensor.data.data(), sizeof(value));
      inputs.values.emplace_back(value);
      continue;
    }
    if (!tag.ok() || *tag != Tag::Tensor) {
      return mismatch("neither a tensor nor an integer");
    }
    const auto info = meta.input_tensor_meta(i);
    if (!info.ok()) {
      return mismatch("a tensor without a shape");
    }
    bool fits = tensor.type == info->scalar_type() &&
                tensor.sizes.size() == info->sizes().size();
    for (size_t j = 0; fits && j < tensor.sizes.size(); ++j) {
      fits = tensor.sizes[j] <= info->sizes()[j];
    }
    if (!fits) {
      return mismatch(
          "at most " + tensor_text(
                           info->scalar_type(),
                           {info->sizes().data(), info->sizes().size()}));
    }
    inputs.tensors.push_back(
        from_blob(tensor.data.data(), tensor.sizes, tensor.type));
    inputs.values.emplace_back(*inputs.tensors.back());
  }
  return inputs;
}

Result<void> run(
    const Options& options,
    const std::optional<CacheConfig>& config) {
  const std::string method = options.method.value_or("forward");
  ASSIGN_OR_RETURN(auto module, open_program_file(*options.pte));
  const auto meta = module->method_meta(method);
  if (!meta.ok()) {
    std::string names;
    if (const auto found = module->method_names(); found.ok()) {
      for (const auto& name : *found) {
        names += (names.empty() ? "" : ", ") + name;
      }
    }
    return refuse("the program has no method " + method + "; it has " + names);
  }
  ASSIGN_OR_RETURN(auto tensors, read_tensors(*options.input));
  ASSIGN_OR_RETURN(const auto inputs, inputs_from(tensors, *meta, method));

  std::optional<CacheSession<Cache>> session;
  if (config) {
    const char* backend =
        meta->uses_backend(kCPUDelegate) ? kCPUBackend : kMLXBackend;
    ASSIGN_OR_RETURN(session, make_decode_session(backend, *config));
  }
  LoadOptions load_options(session ? session->key() : nullptr);
  RETURN_IF_ERROR(load_method(*module, method, load_options));
  ASSIGN_OR_RETURN(const auto outputs, execute(*module, method, inputs.values));
  RETURN_IF_ERROR(write_tensors(*options.output, outputs));

  std::string lines;
  for (const EValue& output : outputs) {
    lines += output_text(output) + "\n";
  }
  write_piece(lines);
  return {};
}

int fail(const Error& error, int status) {
  say("etkv_run: " + error.message());
  return status;
}

} // namespace
} // namespace etkv::examples

int main(int argc, char** argv) {
  using namespace etkv::examples;

  quiet_executorch();
  if (const auto logs = print_log_as_asked(); !logs.ok()) {
    return fail(logs.error(), kMisused);
  }
  Options options;
  const auto arguments = arguments_into(options);
  if (const auto parsed = arguments.parse(argc, argv); !parsed.ok()) {
    return fail(parsed.error(), kMisused);
  }
  if (options.help) {
    write_piece(
        arguments.help() +
        "\nETKV_LOG=debug shows etkv's log, ETKV_VERBOSE=1 ExecuTorch's.\n");
    return 0;
  }
  if (options.version) {
    write_piece(versions("etkv_run"));
    return 0;
  }
  if (!options.pte || !options.input || !options.output) {
    return fail(
        refuse("--pte, --input and --output are needed; --help lists the rest"),
        kMisused);
  }
  std::optional<etkv::CacheConfig> config;
  if (options.kv_cache) {
    auto read = cache_config(*options.kv_cache);
    if (!read.ok()) {
      return fail(read.error(), kMisused);
    }
    if (const auto checked = check_format(read->k_format, "--kv-cache");
        !checked.ok()) {
      return fail(checked.error(), kMisused);
    }
    config = std::move(read.value());
  }
  const auto ran = run(options, config);
  return ran.ok() ? 0 : fail(ran.error(), kFailed);
}
