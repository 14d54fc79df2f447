// etkv_forward: runs a program on ids from a file, for tests and benchmarks.
// Runs a prompt in chunks, then greedy steps. Writes logits as raw float32, and
// times as JSON.

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/arguments.hpp"
#include "examples/common/clock.hpp"
#include "examples/common/format.hpp"
#include "examples/common/log.hpp"
#include "examples/common/model.hpp"
#include "examples/common/program.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

struct Options {
  std::optional<std::string> model;
  std::optional<std::string> ids_file;
  std::optional<std::string> kv_format;
  std::optional<std::string> rows;
  std::optional<std::string> loop;
  std::optional<std::string> logits_file;
  std::optional<std::string> all_logits_file;
  std::optional<int64_t> capacity;
  std::optional<int64_t> chunk;
  std::optional<int64_t> decode;
  std::optional<int64_t> repeat;
  bool json = false;
  bool help = false;
};

Arguments arguments_into(Options& options) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  Arguments arguments(
      "usage: etkv_forward --model MODEL.pte --ids-file FILE [options]\n"
      "Runs a program on the ids of a file, then greedily on its own.\n");
  arguments.text("--model", "FILE", "the program (.pte)", &options.model);
  arguments.text(
      "--ids-file",
      "FILE",
      "the prompt: ids with white space between them",
      &options.ids_file);
  add_format_argument(arguments, &options.kv_format);
  arguments.integer(
      "--capacity",
      "N",
      "positions of the cache; by default all that the\n"
      "program was exported for",
      1,
      kMax,
      &options.capacity);
  arguments.integer(
      "--chunk",
      "N",
      "tokens of a prefill step; 0, the default, for the\n"
      "program's own size",
      0,
      kMax,
      &options.chunk);
  arguments.integer(
      "--decode",
      "N",
      "greedy steps after the prompt (0)",
      0,
      kMax,
      &options.decode);
  arguments.choice(
      "--loop",
      {"steps", "device"},
      "where tokens are chosen: on the host, from the\n"
      "logits of each step (steps), or on the device\n"
      "(async decode)",
      &options.loop);
  arguments.choice(
      "--rows",
      {"last", "all", "proposed"},
      "rows of logits that a step computes (last);\n"
      "proposed is for programs that verify candidates",
      &options.rows);
  arguments.text(
      "--logits",
      "FILE",
      "write the prompt's last row, as float32",
      &options.logits_file);
  arguments.text(
      "--all-logits",
      "FILE",
      "write every row of the prompt, then the row of each\n"
      "greedy step, as float32; implies --rows all",
      &options.all_logits_file);
  arguments.integer(
      "--repeat",
      "N",
      "runs, each on the cleared cache (1)",
      1,
      kMax,
      &options.repeat);
  arguments.flag(
      "--json",
      "print one line of JSON instead of a table; a run's\n"
      "ids are the token after the prompt and one for each\n"
      "step",
      &options.json);
  arguments.flag("--help", "print this and exit", &options.help);
  return arguments;
}

Result<std::vector<int64_t>> read_ids(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    return refuse("cannot read the ids " + path);
  }
  std::vector<int64_t> ids;
  for (std::string word; file >> word;) {
    int64_t id = 0;
    const char* end = word.data() + word.size();
    const auto [stop, code] = std::from_chars(word.data(), end, id);
    if (code != std::errc() || stop != end) {
      return refuse(
          path + " has \"" + word + "\" after " +
          counted(static_cast<int64_t>(ids.size()), "id") + ", not an id");
    }
    ids.push_back(id);
  }
  if (file.bad()) {
    return refuse("cannot read the ids " + path);
  }
  if (ids.empty()) {
    return refuse(path + " has no ids");
  }
  return ids;
}

/// A file of raw float32 rows.
class RowFile {
 public:
  static Result<RowFile> create(const std::string& path) {
    RowFile rows;
    rows.path_ = path;
    rows.file_.open(path, std::ios::binary | std::ios::trunc);
    if (!rows.file_) {
      return refuse("cannot write " + path);
    }
    return rows;
  }

  void write(const LogitsView& logits, int64_t row) {
    row_.resize(static_cast<size_t>(logits.vocabulary));
    copy_row(logits, row, row_.data());
    file_.write(
        reinterpret_cast<const char*>(row_.data()),
        static_cast<std::streamsize>(row_.size() * sizeof(float)));
  }

  Result<void> close() {
    file_.close();
    if (!file_) {
      return refuse("cannot write " + path_);
    }
    return {};
  }

 private:
  std::string path_;
  std::ofstream file_;
  std::vector<float> row_;
};

/// The times and memory of one run.
struct Run {
  double prefill_seconds = 0.0;
  std::vector<double> decode_seconds;
  std::vector<int64_t> ids;
  Memory memory;
  uint64_t peak_memory = 0;
  uint64_t peak_mlx = 0;
};

/// A program, its cache, and the prompt.
class Forward {
 public:
  Forward(Program& program, Cache& cache, std::vector<int64_t> prompt)
      : program_(program), cache_(cache), prompt_(std::move(prompt)) {}

  /// Runs once. Writes rows to the files that are not null.
  Result<Run>
  run(size_t chunk, int64_t decode, RowFile* last_row, RowFile* all_rows) {
    Run run;
    const auto on_chunk = [&](size_t, size_t, const LogitsView& logits) {
      for (int64_t row = 0; all_rows != nullptr && row < logits.rows; ++row) {
        all_rows->write(logits, row);
      }
      return true;
    };
    Stopwatch watch;
    ASSIGN_OR_RETURN(
        const auto filled,
        prefill(
            program_,
            prompt_.data(),
            /*position=*/0,
            prompt_.size(),
            chunk,
            on_chunk));
    const LogitsView& logits = *filled;
    ASSIGN_OR_RETURN(int64_t id, argmax(logits, logits.last_row()));
    run.prefill_seconds = watch.lap();
    run.ids.push_back(id);
    if (last_row != nullptr) {
      last_row->write(logits, logits.last_row());
    }

    auto position = static_cast<int64_t>(prompt_.size());
    for (int64_t i = 0; i < decode; ++i, ++position) {
      watch.lap();
      ASSIGN_OR_RETURN(
          const auto next,
          program_.step_at(&run.ids.back(), position, /*n=*/1));
      ASSIGN_OR_RETURN(id, argmax(next, next.last_row()));
      run.decode_seconds.push_back(watch.lap());
      run.ids.push_back(id);
      if (all_rows != nullptr) {
        all_rows->write(next, next.last_row());
      }
    }
    read_memory(run);
    return run;
  }

  /// Runs once, with tokens that the device chooses.
  Result<Run> run_on_device(int64_t decode) {
    Run run;
    GenerationOptions options;
    options.max_tokens = static_cast<int32_t>(decode) + 1;
    Stopwatch watch;
    ASSIGN_OR_RETURN(
        auto generation, Generation::make(cache_, {{prompt_}}, options));
    for (int64_t i = 0; i <= decode; ++i) {
      ASSIGN_OR_RETURN(const auto next, generation.next());
      run.ids.push_back(next.at(0).token);
      const double seconds = watch.lap();
      if (i == 0) {
        run.prefill_seconds = seconds;
      } else {
        run.decode_seconds.push_back(seconds);
      }
    }
    read_memory(run);
    return run;
  }

 private:
  void read_memory(Run& run) {
    run.memory = *cache_.memory();
    run.peak_memory = peak_memory_bytes();
    run.peak_mlx = mlx_memory().peak;
  }

  Program& program_;
  Cache& cache_;
  std::vector<int64_t> prompt_;
};

template <typename T, typename Write>
std::string json_list(const std::vector<T>& values, Write write) {
  std::string text = "[";
  for (const T& value : values) {
    text += (text.size() > 1 ? ", " : "") + write(value);
  }
  return text + "]";
}

std::string seconds_text(double seconds) {
  return fixed(seconds, 9);
}

std::string json(
    const std::vector<Run>& runs,
    size_t prompt_tokens,
    const std::string& format,
    double load_seconds) {
  const auto one = [](const Run& run) {
    return "{\"prefill_seconds\": " + seconds_text(run.prefill_seconds) +
           ", \"decode_seconds\": " +
           json_list(run.decode_seconds, seconds_text) + ", \"ids\": " +
           json_list(run.ids, [](int64_t id) { return std::to_string(id); }) +
           ", \"cache_allocated_bytes\": " +
           std::to_string(run.memory.allocated) +
           ", \"cache_used_bytes\": " + std::to_string(run.memory.used) +
           ", \"peak_memory_bytes\": " + std::to_string(run.peak_memory) +
           ", \"peak_mlx_bytes\": " + std::to_string(run.peak_mlx) + "}";
  };
  return "{\"kv_format\": \"" + format +
         "\", \"prompt_tokens\": " + std::to_string(prompt_tokens) +
         ", \"load_seconds\": " + seconds_text(load_seconds) +
         ", \"runs\": " + json_list(runs, one) + "}\n";
}

std::string table(const std::vector<Run>& runs, size_t prompt_tokens) {
  std::string text;
  for (const Run& run : runs) {
    double decode_seconds = 0.0;
    for (const double seconds : run.decode_seconds) {
      decode_seconds += seconds;
    }
    const auto steps = static_cast<int64_t>(run.decode_seconds.size());
    text += "prefill " +
            rate(static_cast<int64_t>(prompt_tokens), run.prefill_seconds) +
            " · decode " + rate(steps, decode_seconds) + " · cache " +
            mebibytes(run.memory.allocated) + " · peak " +
            mebibytes(run.peak_memory) + "\nids:";
    for (const int64_t id : run.ids) {
      text += " " + std::to_string(id);
    }
    text += "\n";
  }
  return text;
}

Result<void> run(const Options& options) {
  ASSIGN_OR_RETURN(auto prompt, read_ids(*options.ids_file));
  const size_t prompt_tokens = prompt.size();
  std::optional<RowFile> last_row;
  std::optional<RowFile> all_rows;
  for (auto [path, rows] :
       {std::pair(&options.logits_file, &last_row),
        std::pair(&options.all_logits_file, &all_rows)}) {
    if (*path) {
      ASSIGN_OR_RETURN(auto created, RowFile::create(**path));
      rows->emplace(std::move(created));
    }
  }

  Stopwatch watch;
  ASSIGN_OR_RETURN(auto program, Program::open(*options.model));
  const std::string format =
      options.kv_format.value_or(program.native_format());
  const auto capacity = static_cast<int32_t>(
      options.capacity.value_or(program.params().max_context_length));
  ASSIGN_OR_RETURN(
      auto session,
      make_decode_session(
          program.params().backend_id,
          make_config(program.params(), capacity, format)));
  const Logits wanted = all_rows || options.rows == "all" ? Logits::all
                        : options.rows == "proposed"      ? Logits::proposed
                                                          : Logits::last;
  const bool on_device = options.loop == "device";
  RETURN_IF_ERROR(program.load(session.key(), wanted));
  const double load_seconds = watch.lap();

  Forward forward(program, session.cache(), std::move(prompt));
  std::vector<Run> runs;
  for (int64_t i = 0; i < options.repeat.value_or(1); ++i) {
    RETURN_IF_ERROR(session.cache().clear());
    // The rows are the same in each run. Write them in the first run only, so
    // that the times of other runs do not include the writing.
    ASSIGN_OR_RETURN(
        auto run,
        on_device ? forward.run_on_device(options.decode.value_or(0))
                  : forward.run(
                        static_cast<size_t>(options.chunk.value_or(0)),
                        options.decode.value_or(0),
                        i == 0 && last_row ? &*last_row : nullptr,
                        i == 0 && all_rows ? &*all_rows : nullptr));
    runs.push_back(std::move(run));
  }
  for (auto* rows : {&last_row, &all_rows}) {
    if (*rows) {
      RETURN_IF_ERROR((*rows)->close());
    }
  }
  const std::string report =
      options.json ? json(runs, prompt_tokens, format, load_seconds)
                   : table(runs, prompt_tokens);
  std::fputs(report.c_str(), stdout);
  return {};
}

int fail(const Error& error, int status) {
  std::fprintf(stderr, "etkv_forward: %s\n", error.message().c_str());
  return status;
}

} // namespace
} // namespace etkv::examples

int main(int argc, char** argv) {
  using namespace etkv::examples;

  quiet_executorch();
  if (const auto logs = print_log_as_asked(); !logs.ok()) {
    return fail(logs.error(), 2);
  }
  Options options;
  const auto arguments = arguments_into(options);
  if (const auto parsed = arguments.parse(argc, argv); !parsed.ok()) {
    return fail(parsed.error(), 2);
  }
  if (options.help) {
    std::fputs(arguments.help().c_str(), stdout);
    return 0;
  }
  if (!options.model || !options.ids_file) {
    return fail(
        refuse("--model and --ids-file are needed; --help lists the rest"), 2);
  }
  if (const auto checked = check_format(options.kv_format); !checked.ok()) {
    return fail(checked.error(), 2);
  }
  if (options.loop == "device" &&
      (options.chunk || options.logits_file || options.all_logits_file)) {
    return fail(
        refuse("--chunk, --logits and --all-logits take --loop steps"), 2);
  }
  const auto ran = run(options);
  return ran.ok() ? 0 : fail(ran.error(), 1);
}
