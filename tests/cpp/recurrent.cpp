// A program with recurrent layers on each kind of cache. Its ids equal those of
// transformers, whatever was rewound, forked, proposed or saved before.

#include <filesystem>
#include <fstream>
#include <sstream>

#include "fixture.hpp"

namespace etkv::tests {
namespace {

const char* const kModel =
    on_cpu() ? "recurrent-qwen3.5-cpu-float" : "recurrent-qwen3.5-mlx-float";

/// The distance between anchors.
constexpr int32_t kBlock = 64;
/// Tokens of a step: shorter than blocks.
constexpr int32_t kStep = 32;

/// A prompt, and transformers' greedy ids after it.
struct Text {
  static const Text& get() {
    static const Text text;
    return text;
  }

  Ids ids;
  int64_t prompt = 0;

 private:
  Text() {
    std::ifstream file(
        std::string(ETKV_TEST_MODELS) + "/recurrent-qwen3.5/greedy.txt");
    std::string line;
    REQUIRE(static_cast<bool>(std::getline(file, line)));
    add(line);
    prompt = static_cast<int64_t>(ids.size());
    REQUIRE(static_cast<bool>(std::getline(file, line)));
    add(line);
    REQUIRE(prompt > 2 * kBlock && ids.size() > 3 * kBlock);
  }

  void add(const std::string& line) {
    std::istringstream numbers(line);
    for (int64_t id = 0; numbers >> id;) {
      ids.push_back(id);
    }
  }
};

void large(CacheConfig& config) {
  config.capacity = 600;
  config.max_step_tokens = kStep;
}

template <typename Face>
struct Program : On<Face> {
  Program() : On<Face>(large, kModel) {}

  /// Runs ids at consecutive positions, `chunk` per step, and returns the rows
  /// of the last step. `sequence` is for caches of several sequences.
  Rows read(
      const Ids& ids,
      int64_t begin,
      int64_t end,
      int64_t chunk = kStep,
      int32_t sequence = 0) {
    Rows rows;
    for (int64_t at = begin; at < end; at += chunk) {
      const int64_t n = std::min(chunk, end - at);
      if constexpr (!std::is_same_v<Face, Cache>) {
        must((*this)->begin_step(
            std::vector<int32_t>(static_cast<size_t>(n), sequence)));
      }
      rows = this->model.at(
          at, slice(ids, static_cast<size_t>(at), static_cast<size_t>(n)));
    }
    return rows;
  }

  /// Runs the text from position `begin`, and checks that the answer equals
  /// that of transformers.
  void follow(int64_t begin, int32_t sequence = 0) {
    const Text& text = Text::get();
    if (begin < text.prompt) {
      const Rows rows = read(text.ids, begin, text.prompt, kStep, sequence);
      CHECK_INT(rows.best(), text.ids[text.prompt]);
    }
    const int64_t size = static_cast<int64_t>(text.ids.size());
    for (int64_t at = std::max(begin, text.prompt); at + 1 < size; ++at) {
      CHECK_INT(
          read(text.ids, at, at + 1, 1, sequence).best(), text.ids[at + 1]);
    }
  }
};

void it_decodes() {
  const auto params = Model(kModel).params();
  CHECK(!params.recurrent_layers.empty() && !params.layers.empty());
  Program<Cache> program;
  program.follow(0);
  CHECK(must(program->memory()).used > 0);
}

void it_goes_back() {
  const Text& text = Text::get();
  Program<Cache> program;
  CHECK_INT(must(program->mark(100)), kBlock);
  program.follow(0);
  for (const int32_t back : {1, 7, kBlock}) {
    const int32_t length = must(program->length());
    must(program->rewind(length - back));
    // Other tokens must leave no trace.
    program.read(text.ids, length - back, length - back + 1);
    must(program->rewind(length - back));
    program.follow(length - back);
  }
  const int32_t least = must(program->rewindable_to());
  CHECK(least > 100);
  CHECK_REFUSED(program->rewind(100), ETKV_ERROR_POSITION, "or at 64");
  CHECK_INT(must(program->reachable(100)), kBlock);
  CHECK_INT(must(program->rewind_to_reachable(100)), kBlock);
  program.follow(kBlock);
  // A step that begins below the length also rewinds.
  program.follow(0);
}

void it_forks() {
  const Text& text = Text::get();
  const auto prompt = static_cast<int32_t>(text.prompt);
  Program<SeqCache> program;
  CHECK_INT(must(program->seq_mark(0, 70)), kBlock);
  program.read(text.ids, 0, text.prompt);
  const auto used = must(program->memory()).used;
  must(program->seq_cp(0, 1));
  CHECK(must(program->memory()).used == used);
  // Both sequences go on in the same steps, one of them with other tokens.
  for (int64_t at = text.prompt; at < text.prompt + 20; ++at) {
    must(program->begin_step({1, 0}));
    const Rows rows = must(
        program.model.step({(text.ids[at] + 1) % 250, text.ids[at]}, {at, at}));
    CHECK_INT(rows.row(1).best(), text.ids[at + 1]);
  }
  must(program->seq_rm(0));
  must(program->seq_rm(1, prompt));
  program.follow(text.prompt, 1);
  CHECK_REFUSED(
      program->seq_rm(1, 0, prompt), ETKV_ERROR_POSITION, "are not its last");
  // The branch shares the checkpoint of its source.
  CHECK_INT(must(program->seq_reachable(1, 100)), kBlock);
  must(program->seq_rm(1, kBlock));
  program.follow(kBlock, 1);
}

/// Interleaved chains of candidates after two sequences, with a wrong sibling
/// of each candidate.
void it_proposes() {
  const Text& text = Text::get();
  Program<TreeCache> program;
  program.read(text.ids, 0, text.prompt);
  must(program->seq_cp(0, 1));
  const int64_t size = static_cast<int64_t>(text.ids.size());
  int64_t at = text.prompt;
  for (; at + 4 < size; at += 3) {
    const auto wrong = [&](int64_t position) {
      return (text.ids[position] + 7) % 250;
    };
    for (const int32_t sequence : {0, 1}) {
      must(program->propose({-1, 0, 0, 1, 3}, sequence));
    }
    must(program->begin_step({0, 1, 0, 0, 1, 0, 1, 1, 0, 1}));
    const Rows rows = must(program.model.step(
        {text.ids[at],
         text.ids[at],
         text.ids[at + 1],
         wrong(at + 1),
         text.ids[at + 1],
         text.ids[at + 2],
         wrong(at + 1),
         text.ids[at + 2],
         wrong(at + 3),
         text.ids[at + 3]},
        {at,
         at,
         at + 1,
         at + 1,
         at + 1,
         at + 2,
         at + 1,
         at + 2,
         at + 3,
         at + 3}));
    for (const auto& [row, ahead] : std::vector<std::pair<int64_t, int64_t>>{
             {0, 1}, {1, 1}, {2, 2}, {4, 2}, {5, 3}, {7, 3}, {9, 4}}) {
      CHECK_INT(rows.row(row).best(), text.ids[at + ahead]);
    }
    must(program->commit({0, 1, 3}, 0));
    must(program->commit({0, 1, 3}, 1));
  }
  must(program->seq_rm(0));
  program.follow(at, 1);
}

/// A file of one sequence includes its checkpoints.
void it_is_saved() {
  const Text& text = Text::get();
  const auto path = (std::filesystem::temp_directory_path() /
                     ("etkv-recurrent-" + std::string(backend())))
                        .string();
  Program<SeqCache> saved;
  must(saved->seq_mark(3, 100));
  saved.read(text.ids, 0, text.prompt, kStep, 3);
  must(save_sequence(saved.session.cache(), 3, path, {"tiny", text.ids}));
  Program<SeqCache> loaded;
  loaded.read(text.ids, 0, 40, 40 / 2, 0);
  const auto ids = must(load_sequence(loaded.session.cache(), 1, path, "tiny"));
  std::filesystem::remove(path);
  CHECK(ids == text.ids);
  loaded.follow(text.prompt, 1);
  CHECK_INT(must(loaded->seq_reachable(1, 100)), kBlock);
  must(loaded->seq_rm(1, kBlock));
  loaded.follow(kBlock, 1);
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  it_decodes();
  it_goes_back();
  it_forks();
  it_proposes();
  it_is_saved();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
