// Kinds of the host's own, by callbacks around one that is there.

#include <atomic>
#include <thread>

#include "tap.hpp"

namespace etkv::tests {
namespace {

/// What the callbacks of a test do and see.
struct Host {
  int created = 0;
  int destroyed = 0;
  int began = 0;
  int committed = 0;
  int undone = 0;
  int64_t tokens = 0;
  std::function<etkv_status(etkv_cache*, etkv_error**)> on_create;
  std::function<etkv_status(etkv_cache*, const int32_t*, size_t, etkv_error**)>
      on_begin;
  std::function<etkv_status(etkv_cache*, etkv_error**)> on_change;
};

Host& host(void* state) {
  return *static_cast<Host*>(state);
}

etkv_cache_vtable callbacks() {
  etkv_cache_vtable v{};
  v.struct_size = sizeof(v);
  v.create = [](void* context, etkv_cache* inner, void** state, auto error) {
    ++host(context).created;
    *state = context;
    return host(context).on_create ? host(context).on_create(inner, error)
                                   : etkv_status{ETKV_OK};
  };
  v.destroy = [](void* state) { ++host(state).destroyed; };
  v.begin_step = [](void* state,
                    etkv_cache* inner,
                    const int32_t* positions,
                    size_t n,
                    etkv_error** error) -> etkv_status {
    if (host(state).on_begin) {
      const auto status = host(state).on_begin(inner, positions, n, error);
      if (status != ETKV_OK) {
        return status;
      }
    }
    ++host(state).began;
    host(state).tokens += static_cast<int64_t>(n);
    return ETKV_OK;
  };
  v.end_step = [](void* state, etkv_cache*, bool committed) {
    ++(committed ? host(state).committed : host(state).undone);
  };
  return v;
}

void register_kind(
    const char* kind,
    const char* base,
    const etkv_cache_vtable& v,
    Host& host) {
  must(BuilderRegistry::add(backend(), kind, base, v, &host));
}

template <typename Face>
CacheSession<Face>
session_of(Model& model, const char* kind, int32_t capacity) {
  auto session = must(
      CacheSession<Face>::make(
          backend(), kind, make_config(model.params(), capacity, "f32", 4)));
  must(model.load(session.key()));
  return session;
}

/// Takes the oldest positions of sequence 0 away until `n` more fit.
etkv_status make_room(etkv_cache* inner, size_t n, etkv_error** error) {
  int32_t length = 0;
  const int32_t capacity = etkv_cache_capacity(inner);
  int32_t next = 0;
  etkv_seq_cache* sequences = nullptr;
  etkv_status status = etkv_cache_length(inner, &length, error);
  if (status == ETKV_OK) {
    status = etkv_cache_as_seq(inner, &sequences, error);
  }
  if (status == ETKV_OK) {
    status = etkv_seq_cache_next(sequences, 0, &next, error);
  }
  const int32_t over = length + static_cast<int32_t>(n) - capacity;
  if (status == ETKV_OK && over > 0) {
    // One run of positions, whose last is the one before the next.
    status = etkv_seq_cache_rm(sequences, 0, 0, next - length + over, error);
  }
  etkv_seq_cache_free(sequences);
  return status;
}

/// A conversation that never fills its cache: the oldest positions leave.
void a_kind_that_evicts() {
  Host rolling;
  rolling.on_begin =
      [](etkv_cache* inner, const int32_t*, size_t n, etkv_error** error) {
        return make_room(inner, n, error);
      };
  auto v = callbacks();
  v.can_extend = [](void*, etkv_cache*, int32_t, bool* fits, etkv_error**) {
    *fits = true;
    return etkv_status{ETKV_OK};
  };
  register_kind("rolling", "seq", v, rolling);

  Model model("llama-f32");
  auto session = session_of<SeqCache>(model, "rolling", 12);
  CHECK(session->kind() == "rolling");
  CHECK(*session->can_extend(1000));
  // The same by hand.
  On<SeqCache> by_hand([](CacheConfig& config) { config.capacity = 12; });
  const Ids ids = text(60);
  for (int64_t at = 0; at < 60; at += 3) {
    if (*by_hand->length() + 3 > 12) {
      must(by_hand->seq_rm(0, 0, static_cast<int32_t>(at) - 9));
    }
    const Ids chunk = slice(ids, static_cast<size_t>(at), 3);
    CHECK(model.at(at, chunk) == by_hand.model.at(at, chunk));
    CHECK_INT(*session->length(), *by_hand->length());
    CHECK_INT(must(session->seq_next(0)), at + 3);
  }
  CHECK(*session->memory() == *by_hand->memory());
  CHECK_INT(rolling.began, 20);
  CHECK_INT(rolling.committed, 20);
  CHECK_INT(rolling.undone, 0);
  CHECK_INT(rolling.tokens, 60);

  // The program is the last owner.
  auto gone = std::make_unique<decltype(session)>(std::move(session));
  gone.reset();
  CHECK_INT(rolling.destroyed, 0);
  model.at(60, {1});
  model = Model("llama-f32");
  CHECK_INT(rolling.created, 1);
  CHECK_INT(rolling.destroyed, 1);
}

/// What the host refuses is refused in its words, and nothing has been.
void a_kind_that_refuses() {
  static Host strict;
  auto v = callbacks();
  v.clear =
      [](void* state, etkv_cache* inner, bool release, etkv_error** error) {
        return host(state).on_change ? host(state).on_change(inner, error)
                                     : etkv_cache_clear(inner, release, error);
      };
  v.rewind = [](void* state, etkv_cache* inner, int32_t length, auto error) {
    return host(state).on_change ? host(state).on_change(inner, error)
                                 : etkv_cache_rewind(inner, length, error);
  };
  register_kind("strict", "tree", v, strict);
  Model model("llama-f32");
  auto session = session_of<TreeCache>(model, "strict", 40);
  const Ids ids = text(9);
  model.at(0, slice(ids, 0, 6));
  const Seen before(session.cache());

  strict.on_begin = [](etkv_cache*, const int32_t*, size_t n, auto error) {
    const auto words = "no room for " + std::to_string(n) + " today";
    *error = etkv_error_new(ETKV_ERROR_CAPACITY, words.c_str());
    return etkv_status{ETKV_ERROR_CAPACITY};
  };
  CHECK_REFUSED(
      model.step({1, 2}, {6, 7}), ETKV_ERROR_CAPACITY, "no room for 2 today");
  // Without words of its own, and with a status that is none.
  strict.on_begin = [](auto...) { return etkv_status{ETKV_ERROR_UNSUPPORTED}; };
  CHECK_REFUSED(
      model.step({1}, {6}), ETKV_ERROR_UNSUPPORTED, "begin_step failed");
  strict.on_begin = [](auto...) { return etkv_status{99}; };
  CHECK_REFUSED(model.step({1}, {6}), ETKV_ERROR_INTERNAL, "status 99");
  strict.on_change = [](etkv_cache*, etkv_error** error) {
    *error = etkv_error_new(ETKV_ERROR_POSITION, "it is kept");
    return etkv_status{ETKV_ERROR_POSITION};
  };
  CHECK_REFUSED(session->clear(), ETKV_ERROR_POSITION, "it is kept");
  CHECK_REFUSED(session->rewind(2), ETKV_ERROR_POSITION, "it is kept");
  CHECK(Seen(session.cache()) == before);
  CHECK_INT(strict.began, 1);
  CHECK_INT(strict.undone, 0);

  // What the cache itself refuses ends what the host began.
  strict.on_begin = nullptr;
  strict.on_change = nullptr;
  CHECK_REFUSED(model.step({1}, {9}), ETKV_ERROR_POSITION, "got 9");
  CHECK_INT(strict.began, 2);
  CHECK_INT(strict.undone, 1);

  // The cache that is taken cannot be asked from inside; the inner one can.
  strict.on_begin = [&](etkv_cache* inner, auto, auto, etkv_error** error) {
    int32_t length = 7;
    CHECK_INT(
        etkv_cache_length(session->raw(), &length, error), ETKV_ERROR_STEP);
    CHECK_HAS(etkv_error_message(*error), "from inside");
    CHECK_INT(length, 7);
    CHECK_INT(etkv_cache_length(inner, &length, nullptr), ETKV_OK);
    CHECK_INT(length, 6);
    // An error that goes with no failure is freed.
    return etkv_status{ETKV_OK};
  };
  const Rows rows = model.at(6, slice(ids, 6, 3));
  CHECK(close(rows.last(), alone(ids).last()));
  strict.on_begin = nullptr;

  // Every face is there.
  must(session->seq_cp(0, 1));
  must(session->seq_keep(1));
  must(session->propose({-1, 0}, 1));
  must(model.step({5, 6}, {9, 10}));
  must(session->commit({0}, 1));
  CHECK_INT(must(session->seq_len(1)), 10);
  must(session->compact());
  must(session->rewind(4));
  must(session->convert("f16", "f16"));
  // Whether a step is text is asked of the inner cache.
  if (backend() == std::string(kMLXBackend)) {
    Model text_only("llama-f32");
    must(text_only.load(session.key(), Logits::proposed));
    CHECK_INT(must(text_only.step({1, 2}, {4, 5})).count, 1);
    must(session->begin_step({1, 1}));
    CHECK_INT(must(text_only.step({1, 2}, {6, 7})).count, 2);
  }
  must(session->clear());
  CHECK_INT(*session->length(), 0);
}

void a_kind_that_cannot_be_made() {
  static Host broken;
  broken.on_create = [](etkv_cache*, etkv_error** error) {
    *error = etkv_error_new(ETKV_ERROR_UNSUPPORTED, "not on this machine");
    return etkv_status{ETKV_ERROR_UNSUPPORTED};
  };
  register_kind("broken", "contiguous", callbacks(), broken);
  Model model("llama-f32");
  const auto config = make_config(model.params(), 16);
  CHECK_REFUSED(
      CacheSession<Cache>::make(backend(), "broken", config),
      ETKV_ERROR_UNSUPPORTED,
      "not on this machine");
  CHECK_INT(broken.created, 1);
  CHECK_INT(broken.destroyed, 0);
  // What is wrong with the config is found before the host is asked.
  CHECK_REFUSED(
      CacheSession<Cache>::make(backend(), "broken", CacheConfig{}),
      ETKV_ERROR_INVALID_ARGUMENT,
      "layer");
  CHECK_INT(broken.created, 1);
}

/// A kind that makes room when it is asked, while another thread makes steps.
void asked_during_steps() {
  static Host eager;
  auto v = callbacks();
  v.can_extend =
      [](void*, etkv_cache* inner, int32_t n, bool* fits, etkv_error** error) {
        *fits = true;
        return make_room(inner, static_cast<size_t>(n), error);
      };
  register_kind("eager", "seq", v, eager);
  Model model("llama-f32");
  auto session = session_of<SeqCache>(model, "eager", 12);
  std::atomic<bool> done{false};
  std::atomic<long> asked{0};
  std::thread other([&] {
    while (!done) {
      // On the CPU a step is open between the calls of a forward, and
      // nothing can be removed then.
      const bool fits = *session->can_extend(4);
      CHECK(fits || on_cpu());
      ++asked;
    }
  });
  for (int64_t at = 0; at < 200;) {
    // Refused where it was not asked since the last.
    at += model.step({at % kVocabulary}, {at}).ok() ? 1 : 0;
  }
  done = true;
  other.join();
  CHECK(asked > 0);
  CHECK(*session->length() <= 12);
  CHECK_INT(must(session->seq_next(0)), 200);
}

/// A step that fails when its rows are written, and one that works.
void undone_steps() {
  static Host watched;
  register_kind("watched", "contiguous", callbacks(), watched);
  const Ids ids = text(9);
  {
    Tapped tapped(64, nullptr, "watched");
    tapped.at(0, slice(ids, 0, 6));
    const auto no_output = [](std::vector<EValue*>& arguments) {
      static EValue nothing(int64_t{1});
      arguments[2] = &nothing;
    };
    CHECK_REFUSED(
        tapped.step(slice(ids, 6, 3), 6, no_output),
        ETKV_ERROR_SHAPE,
        "expected a tensor to write to");
    CHECK_INT(watched.undone, 1);
    CHECK_INT(*tapped.cache().length(), 6);
    CHECK(close(tapped.at(6, slice(ids, 6, 3)).last(), alone(ids).last()));
  }
  CHECK_INT(watched.began, 3);
  CHECK_INT(watched.committed, 2);
  CHECK_INT(watched.destroyed, 1);
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  Tap::open();
  a_kind_that_evicts();
  a_kind_that_refuses();
  a_kind_that_cannot_be_made();
  asked_during_steps();
  if (!on_cpu()) {
    undone_steps();
  }
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
