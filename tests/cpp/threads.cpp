// Programs and caches on several threads. Only one thread at a time uses an
// object, except that threads may share caches.

#include <atomic>
#include <mutex>
#include <thread>

#include "fixture.hpp"

namespace etkv::tests {
namespace {

/// Runs `work` on a new thread, and waits for it.
template <typename Work>
void on_a_thread(Work work) {
  std::thread(work).join();
}

/// Returns `n` greedy ids after a prompt.
Ids greedy(Bound& bound, const Ids& prompt, size_t n) {
  Ids ids;
  Rows rows = bound.at(0, prompt);
  auto position = static_cast<int64_t>(prompt.size());
  while (ids.size() < n) {
    ids.push_back(rows.best());
    rows = bound.at(position++, {ids.back()});
  }
  return ids;
}

void load_execute_destroy() {
  const Ids prompt = text(7);
  Bound here;
  const Rows first = here.at(0, prompt);
  const Rows second = here.at(7, {3});
  for (int round = 0; round < 20; ++round) {
    std::unique_ptr<Bound> bound;
    on_a_thread([&] { bound = std::make_unique<Bound>(); });
    on_a_thread([&] { CHECK(bound->at(0, prompt) == first); });
    // Another thread continues where the first stopped.
    on_a_thread([&] { CHECK(bound->at(7, {3}) == second); });
    on_a_thread([&] { must(bound->cache().rewind(7)); });
    CHECK(bound->at(7, {3}) == second);
    on_a_thread([&] { bound.reset(); });
  }
}

void programs_side_by_side() {
  constexpr size_t kThreads = 4;
  constexpr size_t kIds = 40;
  const auto prompt = [](size_t i) {
    return text(5 + static_cast<int64_t>(i), static_cast<uint32_t>(i) + 1);
  };
  const auto generate = [&](size_t i) {
    Bound bound(i % 2 == 0 ? "tiny-llama-f32" : "tiny-qwen3-f32");
    return greedy(bound, prompt(i), kIds);
  };
  std::vector<Ids> serially;
  for (size_t i = 0; i < kThreads; ++i) {
    serially.push_back(generate(i));
  }
  CHECK(serially[0] != serially[2]);

  std::vector<Ids> together(kThreads);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { together[i] = generate(i); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (size_t i = 0; i < kThreads; ++i) {
    CHECK(together[i] == serially[i]);
  }
}

/// Steps of several threads on one cache: each succeeds or is refused.
void one_cache() {
  constexpr int32_t kCapacity = 40;
  Bound first("tiny-llama-f32", kCapacity);
  const Ids ids = text(20);
  const Rows wanted = Bound("tiny-llama-f32", kCapacity).at(0, ids);

  std::atomic<long> worked{0};
  std::atomic<long> refused{0};
  const auto stepping = [&](Model& model, uint32_t seed) {
    for (int i = 0; i < 150; ++i) {
      seed = seed * 1664525U + 1013904223U;
      const int64_t n = 1 + (seed >> 10) % 5;
      // A position near the end, which the other thread moves meanwhile.
      const int64_t at =
          *first.cache().length() + int64_t((seed >> 20) % 4) - 2;
      const auto result = model.step(text(n, seed), run(at, n));
      if (result.ok()) {
        ++worked;
        CHECK_INT(result.value().count, n);
      } else {
        ++refused;
        const auto status = result.error().status();
        // A CPU forward consists of several calls, and is refused instead of
        // waiting for another forward.
        CHECK(
            status == ETKV_ERROR_POSITION || status == ETKV_ERROR_CAPACITY ||
            (on_cpu() && status == ETKV_ERROR_STEP));
      }
      const int32_t length = *first.cache().length();
      CHECK(length >= 0 && length <= kCapacity);
      if (length > kCapacity - 6) {
        // The step is refused if the other thread has already cleared the
        // cache.
        (void)first.cache().rewind(3).ok();
      }
    }
  };
  Model second("tiny-llama-f32");
  must(second.load(first.session.key()));
  std::thread other([&] { stepping(second, 7); });
  stepping(first.model, 8);
  other.join();
  CHECK_INT(worked + refused, 300);
  CHECK(worked > 0);

  // The cache still works.
  must(first.cache().clear());
  CHECK(first.at(0, ids) == wanted);
  must(first.cache().clear());
  CHECK(second.at(0, ids) == wanted);
}

/// Control calls wait for a step to end, and see the cache before or after it.
void control_during_steps() {
  constexpr int32_t kCapacity = 64;
  const Ids ids = text(48);
  const Rows wanted = Bound("tiny-llama-f32", kCapacity).model.read(ids, 4);

  Bound bound("tiny-llama-f32", kCapacity);
  const uint64_t slot = bound.cache().memory()->at_capacity / kCapacity;
  std::atomic<bool> done{false};
  std::atomic<long> asked{0};
  std::atomic<bool> consistent{true};
  std::thread watcher([&] {
    int32_t last = 0;
    while (!done) {
      const int32_t length = *bound.cache().length();
      const Memory memory = *bound.cache().memory();
      const bool holds =
          length % 4 == 0 && length >= last && memory.used % (4 * slot) == 0 &&
          memory.used <= memory.allocated && *bound.cache().can_extend(0) &&
          !*bound.cache().can_extend(kCapacity - length + 1) &&
          bound.cache().capacity() == kCapacity &&
          // Past the end: refused, and changes nothing.
          !bound.cache().rewind(kCapacity + 1).ok();
      consistent = consistent && holds;
      last = length;
      ++asked;
    }
  });
  while (asked == 0) {
    std::this_thread::yield();
  }
  CHECK(bound.model.read(ids, 4) == wanted);
  done = true;
  watcher.join();
  CHECK(consistent);
}

/// Each thread decodes different sequences of one cache, with a separate
/// program. A lock covers each declaration and its step.
void sequences_of_two_threads() {
  constexpr int64_t kIds = 14;
  On<SeqCache> on;
  std::mutex step_lock;
  const auto decode = [&](Model& model, int32_t sequence, bool& same) {
    const Ids ids = text(kIds, static_cast<uint32_t>(sequence));
    const Rows wanted = alone(ids);
    for (int round = 0; round < 5; ++round) {
      for (int64_t at = 0; at < kIds; ++at) {
        const std::lock_guard<std::mutex> lock(step_lock);
        must(on->begin_step({sequence}));
        const Rows rows = must(model.step({ids[at]}, {at}));
        same = same && close(rows, wanted.row(at));
      }
      must(on->seq_rm(sequence));
    }
  };
  Model second("tiny-llama-f32");
  must(second.load(on.session.key()));
  bool same[2] = {true, true};
  std::thread other([&] { decode(second, 3, same[0]); });
  decode(on.model, 200, same[1]);
  other.join();
  CHECK(same[0]);
  CHECK(same[1]);
  CHECK_INT(*on->length(), 0);
}

/// Makes a call that must wait for another thread's step. On MLX the call waits
/// itself; on the CPU it is refused, and repeated.
template <typename Call>
void between_steps(Call call) {
  auto result = call();
  while (on_cpu() && !result.ok() &&
         result.error().status() == ETKV_ERROR_STEP) {
    std::this_thread::yield();
    result = call();
  }
  must(std::move(result));
}

/// Without a common lock, a step may run under the other thread's declaration,
/// and be refused or written to the other sequence (see "Threads" in etkv.h).
/// The cache stays consistent: every sequence is one range from 0, and nothing
/// is lost or counted twice.
void a_cache_stays_whole_without_a_lock() {
  On<SeqCache> on;
  Model second("tiny-llama-f32");
  must(second.load(on.session.key()));
  std::atomic<long> worked{0};
  const auto decode = [&](Model& model, int32_t first) {
    for (int i = 0; i < 100; ++i) {
      const int32_t sequence = first + i % 3;
      const auto at = on->seq_next(sequence);
      if (!at.ok() || !on->begin_step({sequence}).ok()) {
        continue;
      }
      const auto result = model.step({i % kVocabulary}, {at.value()});
      if (result.ok()) {
        ++worked;
      } else {
        const auto status = result.error().status();
        CHECK(
            status == ETKV_ERROR_POSITION || status == ETKV_ERROR_CAPACITY ||
            status == ETKV_ERROR_INVALID_ARGUMENT ||
            (on_cpu() && status == ETKV_ERROR_STEP));
      }
      if (i % 10 == 9) {
        between_steps([&] { return on->seq_rm(sequence); });
        between_steps([&] { return on->compact(); });
      }
    }
  };
  std::thread other([&] { decode(second, 0); });
  decode(on.model, 10);
  other.join();
  CHECK(worked > 0);
  int64_t held = 0;
  for (const int32_t sequence : must(on->sequences())) {
    const auto ranges = must(on->seq_positions(sequence));
    CHECK_INT(ranges.size(), 1);
    CHECK_INT(ranges[0].begin, 0);
    held += must(on->seq_len(sequence));
  }
  CHECK_INT(held, *on->length());
}

/// Several threads use one handle, and free it meanwhile: each call works as if
/// the handle were freed after it, or is refused.
void one_handle() {
  Model model("tiny-llama-f32");
  const Session session = session_for(model);
  for (int round = 0; round < 30; ++round) {
    etkv_cache* handle = nullptr;
    REQUIRE(etkv_registry_get(session.key(), &handle, nullptr) == ETKV_OK);
    std::atomic<int> running{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        ++running;
        for (;;) {
          int32_t length = -1;
          etkv_error* error = nullptr;
          const int32_t capacity = etkv_cache_capacity(handle);
          const auto status = etkv_cache_length(handle, &length, &error);
          if (status != ETKV_OK) {
            CHECK_INT(status, ETKV_ERROR_INVALID_ARGUMENT);
            CHECK_HAS(etkv_error_message(error), "it was freed");
            etkv_error_free(error);
            CHECK(capacity == 64 || capacity == 0);
            CHECK_INT(etkv_cache_capacity(handle), 0);
            return;
          }
          CHECK_INT(length, 0);
          CHECK_INT(capacity, 64);
        }
      });
    }
    while (running < 3) {
      std::this_thread::yield();
    }
    etkv_cache_free(handle);
    for (auto& thread : threads) {
      thread.join();
    }
  }
}

/// Caches and programs are made and freed while another program runs.
void coming_and_going() {
  const Ids prompt = text(6);
  Bound steady;
  const Ids wanted = greedy(steady, prompt, 50);
  must(steady.cache().clear());

  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    while (!done) {
      Bound bound("tiny-qwen3-f32");
      bound.at(0, text(9));
    }
  });
  threads.emplace_back([&] {
    Model model("tiny-llama-f32");
    while (!done) {
      Session session = session_for(model);
      Model other("tiny-llama-f32");
      must(other.load(session.key()));
      other.at(0, text(5));
      // The program is the last owner of the cache, and this thread frees both.
      Session gone = std::move(session);
    }
  });
  CHECK(greedy(steady, prompt, 50) == wanted);
  done = true;
  for (auto& thread : threads) {
    thread.join();
  }
}

/// Only the thread whose step failed gets the error.
void errors_of_a_thread() {
  Bound bound;
  bound.at(0, text(3));
  const auto fail = [&](int64_t position) {
    Ids id = {1};
    const auto ids = from_blob(id.data(), {1, 1}, ScalarType::Long);
    const auto at = from_blob(&position, {1}, ScalarType::Long);
    CHECK(!bound.model.module()
               .execute("forward", {EValue(*ids), EValue(*at)})
               .ok());
  };
  const auto taken = [] {
    etkv_error* error = etkv_delegate_take_error();
    const std::string words = etkv_error_message(error);
    etkv_error_free(error);
    return words;
  };
  etkv_error_free(etkv_delegate_take_error());

  fail(11);
  on_a_thread([&] {
    CHECK(taken().empty());
    fail(12);
    fail(13);
    // The last error.
    CHECK_HAS(taken().c_str(), "position 13");
    CHECK(taken().empty());
    // An error that nothing takes is freed when its thread ends.
    fail(14);
  });
  CHECK_HAS(taken().c_str(), "position 11");
  CHECK(taken().empty());
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  load_execute_destroy();
  programs_side_by_side();
  one_cache();
  control_during_steps();
  sequences_of_two_threads();
  a_cache_stays_whole_without_a_lock();
  one_handle();
  coming_and_going();
  errors_of_a_thread();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
