// Caches in files, with programs: a loaded cache continues with the same
// logits, bit for bit. Files that do not fit are refused.

#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include "fixture.hpp"

namespace etkv::tests {
namespace {

const char* const kFingerprint = "tiny llama";

/// The path of a file or a folder of this test, removed at the end.
struct TemporaryPath {
  explicit TemporaryPath(const std::string& name)
      : path((std::filesystem::temp_directory_path() /
              ("etkv-" + std::string(backend()) + "-" + name))
                 .string()) {
    std::filesystem::remove_all(path);
  }
  ~TemporaryPath() {
    std::filesystem::remove_all(path);
  }
  std::string path;
};

/// Saves a prompt. The next tokens give the same logits in the saved cache and
/// in a cache that loads the file.
template <typename Face>
void goes_on(const Change& change) {
  const TemporaryPath temporary("saving.safetensors");
  const Ids ids = text(20);
  On<Face> saved(change);
  saved.model.read(ids, 4, 0, 12);
  must(save_cache(
      saved.cache(), temporary.path, {kFingerprint, slice(ids, 0, 12)}));
  CHECK(must(fingerprint(temporary.path)).rfind("xxh3-", 0) == 0);

  On<Face> loaded(change);
  // The load replaces these contents.
  loaded.model.at(0, text(5, 9));
  const auto tokens =
      must(load_cache(loaded.cache(), temporary.path, kFingerprint));
  CHECK(tokens == slice(ids, 0, 12));
  CHECK_INT(*loaded->length(), 12);
  CHECK(loaded.model.read(ids, 1, 12) == saved.model.read(ids, 1, 12));
}

/// Saves one of two sequences. Its next tokens give the same logits in its
/// cache and in a cache that holds another sequence and loads the file.
template <typename Face>
void a_sequence_goes_on() {
  const TemporaryPath temporary("saving.safetensors");
  const Ids ids = text(20);
  const auto step = [](On<Face>& on, int32_t sequence, const Ids& tokens) {
    const int32_t start = must(on->seq_next(sequence));
    must(on->begin_step(std::vector<int32_t>(tokens.size(), sequence)));
    return on.model.at(start, tokens);
  };
  On<Face> saved;
  step(saved, 0, text(7, 3));
  step(saved, 1, slice(ids, 0, 12));
  must(save_sequence(
      saved.cache(), 1, temporary.path, {kFingerprint, slice(ids, 0, 12)}));
  CHECK_REFUSED(
      save_sequence(saved.cache(), 2, temporary.path),
      ETKV_ERROR_INVALID_ARGUMENT,
      "sequence 2 holds no positions");

  On<Face> loaded;
  step(loaded, 1, text(5, 9));
  const auto found =
      must(load_sequence(loaded.cache(), 4, temporary.path, kFingerprint));
  CHECK(found == slice(ids, 0, 12));
  CHECK_INT(must(loaded.cache().seq_len(1)), 5);
  CHECK_REFUSED(
      load_sequence(loaded.cache(), 1, temporary.path, kFingerprint),
      ETKV_ERROR_INVALID_ARGUMENT,
      "sequence 1 holds 5 positions");
  CHECK_REFUSED(
      load_sequence(loaded.cache(), 5, temporary.path, "another"),
      ETKV_ERROR_FILE,
      "expected `another`");
  for (size_t i = 12; i < 20; ++i) {
    const Ids one = slice(ids, i, 1);
    CHECK(step(loaded, 4, one) == step(saved, 1, one));
  }
}

void a_damaged_file() {
  const TemporaryPath temporary("saving.safetensors");
  const Ids ids = text(8);
  Bound bound;
  bound.at(0, ids);
  must(save_cache(bound.cache(), temporary.path));
  const auto size = std::filesystem::file_size(temporary.path);
  std::filesystem::resize_file(temporary.path, size - 1);
  CHECK_REFUSED(
      load_cache(bound.cache(), temporary.path),
      ETKV_ERROR_FILE,
      "its header says");
  must(save_cache(bound.cache(), temporary.path));
  {
    // Damage in the last checksum.
    std::fstream file(
        temporary.path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const int last = file.get();
    file.seekp(-1, std::ios::end);
    file.put(static_cast<char>(last ^ 1));
  }
  CHECK_REFUSED(
      load_cache(bound.cache(), temporary.path), ETKV_ERROR_FILE, "checksum");
  // The cache continues as before.
  CHECK_INT(*bound.cache().length(), 8);
  Bound other;
  other.at(0, ids);
  CHECK(bound.at(8, {1}) == other.at(8, {1}));
}

/// Returns the status for an invalid address, which depends on whether the
/// library has buckets.
etkv_status refusal_of_addresses() {
  const auto opened = PrefixStore::open("nothing://a-bucket", 1);
  REQUIRE(!opened.ok());
  const bool has_buckets = opened.error().status() != ETKV_ERROR_UNSUPPORTED;
  return has_buckets ? ETKV_ERROR_FILE : ETKV_ERROR_UNSUPPORTED;
}

/// Of two texts with a common beginning, the second loads the beginning from a
/// store, and continues with the same logits.
template <typename Face>
void a_stored_text() {
  const TemporaryPath folder("store");
  auto store = must(PrefixStore::open(folder.path, 1 << 20));
  const Ids ids = text(44);
  On<Face> saved;
  saved.model.read(ids, 4, 0, 40);
  const SaveOptions whole = {kFingerprint, slice(ids, 0, 40)};
  CHECK(must(store.save(saved.cache(), whole)));
  CHECK(!must(store.save(saved.cache(), whole)));
  CHECK_INT(must(store.usage()).files, 1);

  // The first 36 tokens are the same, later ones differ.
  Ids other = joined(slice(ids, 0, 36), text(6, 7));
  other[36] = (ids[36] + 1) % kVocabulary;
  On<Face> loaded;
  const SaveOptions asked = {kFingerprint, other};
  CHECK_INT(must(store.find(loaded.cache(), asked)), 36);
  CHECK_INT(must(store.load(loaded.cache(), asked)), 36);
  CHECK_INT(*loaded->length(), 36);
  must(saved.cache().rewind(36));
  CHECK(loaded.model.read(other, 1, 36) == saved.model.read(other, 1, 36));
  // Read ahead into memory, if the backend shares memory.
  auto prefixes = must(PrefixCache::make(0, &store));
  if (must(prefixes.prefetch(loaded.cache(), asked))) {
    while (must(prefixes.statistics()).ahead_waiting > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const auto held = must(prefixes.statistics());
    CHECK_INT(held.ahead_failed, 0);
    CHECK_INT(held.tokens_ahead, 36);
    On<Face> attached;
    CHECK_INT(must(prefixes.attach(attached.cache(), asked)), 36);
    CHECK_INT(must(prefixes.statistics()).tokens_in_memory, 36);
  }
  CHECK_REFUSED(
      PrefixStore::open("nothing://a-bucket", 1),
      refusal_of_addresses(),
      "nothing://a-bucket");
  // Another model, and a cache that is not empty.
  On<Face> fresh;
  CHECK_INT(must(store.load(fresh.cache(), {"another model", other})), 0);
  CHECK_REFUSED(
      store.load(loaded.cache(), asked),
      ETKV_ERROR_INVALID_ARGUMENT,
      "clear it");
}

/// A prefix, alone and in a prefix cache: another cache continues from it with
/// the same logits, even after the cache that read the text is freed.
template <typename Face>
void a_shared_text() {
  const Ids ids = text(44);
  auto prefixes = must(PrefixCache::make());
  const SaveOptions whole = {kFingerprint, slice(ids, 0, 40)};
  std::optional<Prefix> prefix;
  {
    On<Face> read;
    read.model.read(ids, 4, 0, 40);
    auto frozen = freeze(read.cache());
    if (!frozen.ok()) {
      // A backend that cannot share memory.
      CHECK(frozen.error().status() == ETKV_ERROR_UNSUPPORTED);
      return;
    }
    prefix.emplace(std::move(*frozen));
    CHECK(must(prefixes.keep(read.cache(), whole)));
    CHECK_INT(must(read->memory()).shared, prefix->bytes());
  }
  CHECK_INT(prefix->length(), 40);
  CHECK_INT(prefix->rewindable_to(), 1);

  On<Face> fresh;
  fresh.model.read(ids, 4, 0, 36);
  On<Face> attached;
  must(attach(attached.cache(), *prefix, 36));
  On<Face> found;
  CHECK_INT(
      must(prefixes.attach(found.cache(), {kFingerprint, slice(ids, 0, 36)})),
      36);
  const Rows expected = fresh.model.read(ids, 1, 36);
  CHECK(attached.model.read(ids, 1, 36) == expected);
  CHECK(found.model.read(ids, 1, 36) == expected);
  CHECK_REFUSED(
      attach(attached.cache(), *prefix, 40),
      ETKV_ERROR_INVALID_ARGUMENT,
      "clear it");
  must(attached.cache().clear());
  CHECK_REFUSED(
      attach(attached.cache(), *prefix, 41),
      ETKV_ERROR_INVALID_ARGUMENT,
      "it has 40 positions, and the minimum is 1");
  {
    const auto pin = must(prefixes.pin(found.cache(), whole));
    must(prefixes.clear());
    CHECK_INT(must(prefixes.statistics()).pinned, 1);
    CHECK_INT(must(prefixes.find(found.cache(), whole)), 40);
  }
  const auto held = must(prefixes.statistics());
  CHECK_INT(held.prefixes, 1);
  CHECK_INT(held.tokens_asked, 36);
  CHECK_INT(held.tokens_in_memory, 36);
  CHECK_INT(must(prefixes.reclaim(1)), 0);
  must(found.cache().clear(/*release=*/true));
  must(attached.cache().clear(/*release=*/true));
  prefix.reset();
  CHECK_INT(must(prefixes.reclaim(1)), held.bytes);
}

void run_all() {
  a_shared_text<Cache>();
  a_shared_text<SeqCache>();
  a_shared_text<TreeCache>();
  a_stored_text<Cache>();
  a_stored_text<SeqCache>();
  a_stored_text<TreeCache>();
  goes_on<Cache>(nullptr);
  goes_on<SeqCache>(nullptr);
  goes_on<TreeCache>(nullptr);
  goes_on<Cache>([](CacheConfig& config) {
    config.k_format = "row-int4";
    config.v_format = "bf16";
  });
  a_sequence_goes_on<SeqCache>();
  a_sequence_goes_on<TreeCache>();
  a_damaged_file();
}

} // namespace
} // namespace etkv::tests

int main() {
  etkv::examples::quiet_executorch();
  etkv::tests::run_all();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
