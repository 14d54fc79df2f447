// etkv_agent_fork: reads a long shared context once, forks it into branches
// without copying, decodes the branches together, and keeps the best. With a
// prefix store, it reads only the part of the context that is not stored.

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/batch.hpp"
#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/reference_decoding.hpp"
#include "examples/common/runner.hpp"
#include "examples/common/shared_prefix.hpp"
#include "examples/common/stored_prefixes.hpp"
#include "examples/common/try.hpp"
#include "examples/common/warm_up.hpp"

namespace etkv::examples {
namespace {

/// The sequence with only the context.
constexpr int32_t kTrunk = 0;

const std::vector<std::string>& tasks() {
  static const std::vector<std::string> all = {
      "Who borrowed the first book in the register?",
      "Name one title from the register.",
      "On which days were books borrowed?",
      "How long may a book be kept?",
      "Write a short note to the reader who borrowed most.",
      "Which title would you read first?",
      "What is the register for?",
      "Sum up the register in one sentence.",
  };
  return all;
}

/// Returns an entry of a library's register.
std::string entry(size_t i) {
  static const char* const readers[] = {"Ada", "Ben", "Cleo", "Dan", "Eve"};
  static const char* const titles[] = {
      "The Tides",
      "A Winter Road",
      "Bees",
      "The Glass Mill",
      "Old Maps",
      "Salt",
      "Nine Bridges"};
  static const char* const days[] = {"Monday", "Wednesday", "Friday"};
  return std::to_string(i + 1) + ". " + readers[i % 5] + " borrowed \"" +
         titles[i % 7] + "\" on " + days[i % 3] + ", for " +
         std::to_string(1 + i % 4) + " weeks.\n";
}

struct ForkOptions {
  std::optional<std::string> prefix_store;
  std::optional<std::string> context;
  std::optional<int64_t> context_tokens;
};

Result<std::string> read_file(const std::string& path) {
  const auto failed = [&path] {
    return refuse(
        "cannot read a context from " + path + ": " + std::strerror(errno));
  };
  // The C functions report the reason of a failure. A C++ stream throws for a
  // folder.
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(
      std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) {
    return failed();
  }
  std::string all;
  char piece[4096];
  while (const size_t n = std::fread(piece, 1, sizeof(piece), file.get())) {
    all.append(piece, n);
  }
  if (std::ferror(file.get()) != 0) {
    return failed();
  }
  return all;
}

/// Returns the context of all branches: the contents of a file, or a register
/// of the requested number of tokens.
Result<std::string> read_context(
    const ForkOptions& options,
    const Tokenizer& tokenizer) {
  if (options.context) {
    ASSIGN_OR_RETURN(std::string all, read_file(*options.context));
    if (all.empty()) {
      return refuse("the context in " + *options.context + " is empty");
    }
    return all;
  }
  std::string all = "You help in a small library. This is its register.\n";
  ASSIGN_OR_RETURN(
      auto ids, tokenizer.encode(all, /*add_special_tokens=*/false));
  const auto wanted = static_cast<size_t>(options.context_tokens.value_or(256));
  for (size_t i = 0, n = ids.size(); n < wanted; ++i) {
    ASSIGN_OR_RETURN(
        ids, tokenizer.encode(entry(i), /*add_special_tokens=*/false));
    n += ids.size();
    all += entry(i);
  }
  return all;
}

/// Returns the mean log probability of an answer's ids.
double score(const Decoding& branch) {
  return branch.log_probability / static_cast<double>(branch.ids.size());
}

bool less_sure(const Decoding* a, const Decoding* b) {
  return score(*a) < score(*b);
}

class Fork {
 public:
  Fork(
      Model& model,
      SeqCache& cache,
      const RunnerOptions& options,
      std::string context,
      StoredPrefixes* stored)
      : model_(model),
        cache_(cache),
        options_(options),
        context_(std::move(context)),
        stored_(stored) {}

  /// Asks each question about the context in its own branch, and continues the
  /// best branch.
  Result<void> run(const std::vector<std::string>& tasks) {
    RETURN_IF_ERROR(encode(tasks));
    ASSIGN_OR_RETURN(bool going, read_trunk());
    for (auto& branch : branches_) {
      if (going) {
        // No bytes move: the branch shares the trunk's cells, and adds new
        // ones.
        RETURN_IF_ERROR(cache_.seq_cp(kTrunk, branch.sequence));
        ASSIGN_OR_RETURN(going, read_task(branch));
      }
    }
    RETURN_IF_ERROR(decode());
    if (!going || interrupted()) {
      return {};
    }
    RETURN_IF_ERROR(report());
    for (const auto& branch : branches_) {
      RETURN_IF_ERROR(show_scored(branch));
    }
    return keep_best();
  }

  const std::vector<Decoding>& answers() const {
    return answers_;
  }

 private:
  Result<void> encode(const std::vector<std::string>& tasks) {
    for (const auto& task : tasks) {
      ASSIGN_OR_RETURN(
          auto ids, model_.encode({{"system", context_}, {"user", task}}));
      RETURN_IF_ERROR(check_length(ids.size(), cache_.capacity()));
      // A branch runs at least its last token, for the logits.
      const size_t most = ids.size() - 1;
      shared_ = branches_.empty()
                    ? most
                    : std::min({shared_, most, shared_prefix(ids, trunk())});
      branches_.push_back(
          {task,
           std::move(ids),
           options_.max_tokens,
           static_cast<int32_t>(1 + branches_.size())});
    }
    return {};
  }

  const std::vector<int64_t>& trunk() const {
    return branches_.front().prompt;
  }

  /// Reads the part of the shared context that is not in the store. Returns
  /// false after Ctrl-C.
  Result<bool> read_trunk() {
    const auto end = trunk().begin() + static_cast<std::ptrdiff_t>(shared_);
    SaveOptions text;
    if (stored_ != nullptr && shared_ > 0) {
      text = {stored_->fingerprint, {trunk().begin(), end}};
      ASSIGN_OR_RETURN(loaded_, stored_->prefixes.attach(cache_, text));
    }
    ASSIGN_OR_RETURN(
        const auto logits,
        read_ids(model_, cache_, kTrunk, trunk(), loaded_, shared_));
    prefill_tokens_ = shared_ - loaded_;
    if (!logits && loaded_ < shared_) {
      return false;
    }
    if (!text.tokens.empty()) {
      ASSIGN_OR_RETURN(
          const bool kept, stored_->prefixes.keep(cache_, std::move(text)));
      static_cast<void>(kept);
    }
    return true;
  }

  /// Reads the tokens of a branch that follow the shared ones. Returns false
  /// after Ctrl-C.
  Result<bool> read_task(Decoding& branch) {
    const size_t rest = branch.prompt.size() - shared_;
    ASSIGN_OR_RETURN(
        const bool fits, cache_.can_extend(static_cast<int32_t>(rest)));
    if (!fits) {
      stop_full(branch);
      RETURN_IF_ERROR(cache_.seq_rm(branch.sequence));
      return true;
    }
    prefill_tokens_ += rest;
    return begin(model_, cache_, branch, shared_);
  }

  /// Runs one token of each branch per step, until all branches have ended.
  Result<void> decode() {
    for (auto active = unfinished(branches_); !active.empty() && !interrupted();
         active = unfinished(branches_)) {
      ASSIGN_OR_RETURN(
          const bool fits,
          cache_.can_extend(static_cast<int32_t>(active.size())));
      if (fits) {
        RETURN_IF_ERROR(step_together(model_, cache_, active));
        continue;
      }
      Decoding& worst =
          **std::min_element(active.begin(), active.end(), less_sure);
      stop_full(worst);
      if (active.size() > 1) {
        // Make room for the other branches.
        RETURN_IF_ERROR(cache_.seq_rm(worst.sequence));
      }
    }
    return {};
  }

  void stop_full(Decoding& branch) {
    branch.stop = FinishReason::capacity;
    say_stop(FinishReason::capacity, cache_.capacity());
  }

  Result<void> show_scored(const Decoding& branch) {
    if (branch.ids.empty()) {
      return {};
    }
    answers_.push_back(branch);
    return show(
        model_,
        options_,
        branch.title + " [" + fixed(score(branch), 3) + "]",
        branch.ids);
  }

  /// Returns whether the sequence of a branch holds tokens: true until the
  /// sequence is removed.
  Result<bool> holds(const Decoding& branch) const {
    ASSIGN_OR_RETURN(const int32_t length, cache_.seq_len(branch.sequence));
    return length > 0;
  }

  /// Prints the savings of the fork, compared with one run per branch.
  Result<void> report() const {
    int64_t begun = 0;
    size_t apart = 0;
    size_t own = 0;
    size_t longest = 0;
    uint64_t bytes_apart = 0;
    for (const auto& branch : branches_) {
      if (branch.ids.empty()) {
        continue; // There was no room for the prompt.
      }
      ++begun;
      apart += branch.prompt.size();
      // The last id is not in the cache.
      const size_t length = branch.prompt.size() + branch.ids.size() - 1;
      ASSIGN_OR_RETURN(
          const Memory alone,
          estimate(model_.config(), static_cast<int32_t>(length)));
      bytes_apart += alone.used;
      ASSIGN_OR_RETURN(const bool held, holds(branch));
      if (held) {
        own += length - shared_;
        longest = std::max(longest, length);
      }
    }
    const std::string runs = counted(begun, "run");
    ASSIGN_OR_RETURN(const Memory memory, cache_.memory());
    ASSIGN_OR_RETURN(const int32_t positions, cache_.length());
    say("prefill: " + std::to_string(prefill_tokens_) + " tokens, " +
        std::to_string(shared_ - loaded_) + " of them shared" +
        (loaded_ > 0 ? ", after " + std::to_string(loaded_) + " from the store"
                     : "") +
        "; " + runs + " would read " + std::to_string(apart) + ", " +
        std::to_string(apart - prefill_tokens_) + " are saved");
    say("cache: " + counted(positions, "position") + ", " +
        std::to_string(own) + " of them the branches' own, the longest of " +
        std::to_string(longest) + "; " + exact_bytes(memory.used) +
        " in use, " + exact_bytes(memory.allocated) + " held; " + runs +
        " would use " + exact_bytes(bytes_apart) + " (" + model_.format() +
        ")");
    return {};
  }

  /// Removes every branch except the best one, and asks the best branch another
  /// question.
  Result<void> keep_best() {
    const Decoding* best = nullptr;
    for (const auto& branch : branches_) {
      ASSIGN_OR_RETURN(const bool held, holds(branch));
      if (held && (best == nullptr || less_sure(best, &branch))) {
        best = &branch;
      }
    }
    if (best == nullptr) {
      return {};
    }
    const Decoding kept = *best;
    RETURN_IF_ERROR(cache_.seq_keep(kept.sequence));
    // The branch's cells are scattered among cells of removed branches.
    // Contiguous cells need no mask.
    RETURN_IF_ERROR(cache_.compact());
    ASSIGN_OR_RETURN(const int32_t length, cache_.length());
    say("kept: " + kept.title + " (" + counted(length, "position") + ")");
    ASSIGN_OR_RETURN(auto next, follow_up(kept));
    branches_.assign(1, std::move(next));
    ASSIGN_OR_RETURN(const bool going, read_task(branches_[0]));
    RETURN_IF_ERROR(decode());
    return going && !interrupted() ? show_scored(branches_[0]) : Result<void>();
  }

  /// Returns the next question to a branch, and cuts the sequence of the branch
  /// to the ids that it shares with the question.
  Result<Decoding> follow_up(const Decoding& kept) {
    static const char kQuestion[] = "Say that again in other words.";
    ASSIGN_OR_RETURN(const std::string said, model_.decode(kept.ids));
    ASSIGN_OR_RETURN(
        auto ids,
        model_.encode(
            {{"system", context_},
             {"user", kept.title},
             {"assistant", said, model_.without_eos(kept.ids)},
             {"user", kQuestion}}));
    auto held = kept.prompt;
    held.insert(held.end(), kept.ids.begin(), kept.ids.end() - 1);
    // The template may change the answer's text.
    const size_t same = std::min(shared_prefix(ids, held), ids.size() - 1);
    ASSIGN_OR_RETURN(shared_, cut(cache_, kept.sequence, same));
    return Decoding{
        kQuestion, std::move(ids), options_.max_tokens, kept.sequence};
  }

  Model& model_;
  SeqCache& cache_;
  const RunnerOptions& options_;
  std::string context_;
  /// Null if there is no store.
  StoredPrefixes* stored_;
  std::vector<Decoding> branches_;
  /// The number of ids that all branches begin with.
  size_t shared_ = 0;
  /// The number of shared ids that came from the store.
  size_t loaded_ = 0;
  size_t prefill_tokens_ = 0;
  std::vector<Decoding> answers_;
};

Result<void> run(const RunnerOptions& options, const ForkOptions& more) {
  ASSIGN_OR_RETURN(auto model, Model::open(options.model));
  auto config = model.config();
  // A context is long: doubling buffers could allocate twice the memory that it
  // needs.
  config.growth = Growth::step;
  config.min_chunk = 64;
  ASSIGN_OR_RETURN(auto session, make_seq_session(model.backend_id(), config));
  RETURN_IF_ERROR(load_warm(model.program(), session, Logits::all));
  ASSIGN_OR_RETURN(
      const std::string context, read_context(more, model.tokenizer()));

  std::optional<StoredPrefixes> stored;
  if (more.prefix_store) {
    ASSIGN_OR_RETURN(stored, open_prefixes(model, more.prefix_store));
  }

  Fork fork(
      model, session.cache(), options, context, stored ? &*stored : nullptr);
  RETURN_IF_ERROR(fork.run(options.prompts_or(tasks())));
  return options.check && !interrupted() ? check_answers(model, fork.answers())
                                         : Result<void>();
}

} // namespace
} // namespace etkv::examples

int main(int argc, char** argv) {
  using namespace etkv::examples;

  Runner runner(
      "etkv_agent_fork",
      "Asks several questions about one long context, which is read once and\n"
      "forked into a branch for each. The branches are decoded together. The\n"
      "branch with the most probable answer is kept and asked again.\n");
  ForkOptions more;
  runner.arguments().text(
      "--context", "FILE", "the text that all branches share", &more.context);
  runner.arguments().integer(
      "--context-tokens",
      "N",
      "without one, a register of this many tokens or a\n"
      "few more (256)",
      1,
      1 << 20,
      &more.context_tokens);
  runner.arguments().text(
      "--prefix-store",
      "DIR",
      "keep the context that was read in this folder or\n"
      "bucket (s3://bucket/prefix), and load it from there\n"
      "the next time; the files, 4 GiB at most, hold the\n"
      "text",
      &more.prefix_store);
  runner.require([&]() -> etkv::Result<void> {
    if (more.context && more.context_tokens) {
      return refuse(
          "--context-tokens is the length of a generated context, and "
          "--context names a file");
    }
    // The trunk counts as a sequence of the cache.
    constexpr size_t kMax = kSequences - 1;
    const size_t n = runner.options().prompts_or(tasks()).size();
    if (n > kMax) {
      return refuse(
          std::to_string(n) + " prompts are more than the " +
          std::to_string(kMax) + " branches that a cache has besides a trunk");
    }
    return {};
  });
  return runner.main(argc, argv, [&](const RunnerOptions& options) {
    return run(options, more);
  });
}
