// etkv for C++17: the faces of a cache, and the session that a program finds it
// by. Header only, over etkv.h; needs neither exceptions nor RTTI.
//
//   auto session = etkv::make_decode_session("MLXBackend", config);
//   if (!session.ok()) return complain(session.error());
//   load(program, {{"cache_key", session->key()}});
//   while (session->cache().can_extend()) ...
//
// Ownership and threads are as etkv.h says.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "etkv/etkv.h"

namespace etkv {

/// What went wrong: a status of etkv.h, and a sentence for people.
class Error {
 public:
  Error(etkv_status status, std::string message)
      : status_(status), message_(std::move(message)) {}

  /// Takes over an error object of the C interface, and frees it.
  static Error adopt(etkv_status status, etkv_error* error) {
    Error adopted(status, etkv_error_message(error));
    etkv_error_free(error);
    return adopted;
  }

  etkv_status status() const {
    return status_;
  }
  const std::string& message() const {
    return message_;
  }

 private:
  etkv_status status_;
  std::string message_;
};

/// A value or the error that took its place. Ask `ok()` before the rest.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const {
    return state_.index() == 0;
  }
  explicit operator bool() const {
    return ok();
  }
  T& value() {
    return *std::get_if<0>(&state_);
  }
  const T& value() const {
    return *std::get_if<0>(&state_);
  }
  T& operator*() {
    return value();
  }
  T* operator->() {
    return &value();
  }
  const Error& error() const {
    return *std::get_if<1>(&state_);
  }

 private:
  std::variant<T, Error> state_;
};

/// Success, or the error that took its place.
template <>
class [[nodiscard]] Result<void> {
 public:
  Result() : error_(ETKV_OK, "") {}
  Result(Error error) : error_(std::move(error)) {}

  bool ok() const {
    return error_.status() == ETKV_OK;
  }
  explicit operator bool() const {
    return ok();
  }
  const Error& error() const {
    return error_;
  }

 private:
  Error error_;
};

/// Bytes of a cache's buffers.
struct Memory {
  uint64_t allocated = 0;   ///< held now
  uint64_t used = 0;        ///< of these, in use by positions
  uint64_t at_capacity = 0; ///< what it would hold at capacity
};

namespace detail {
/// A C handle that is freed once.
template <typename T, void (*Free)(T*)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T* raw) : raw_(raw) {}
  Handle(Handle&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    Free(raw_);
  }
  T* get() const {
    return raw_;
  }

 private:
  T* raw_ = nullptr;
};

inline Result<void> check(etkv_status status, etkv_error* error) {
  if (status == ETKV_OK) {
    return {};
  }
  return Error::adopt(status, error);
}
} // namespace detail

/// The face that every cache has: admission, length, rollback, memory.
class Cache {
 public:
  /// The backend-neutral kind that carries this face alone.
  static constexpr const char* kKind = "contiguous";

  explicit Cache(etkv_cache* raw) : handle_(raw) {}

  /// Whether `n` more positions fit; false if `n` is negative.
  bool can_extend(int32_t n = 1) const {
    bool fits = false;
    etkv_cache_can_extend(handle_.get(), n, &fits, nullptr);
    return fits;
  }
  /// The most positions that it holds.
  int32_t capacity() const {
    int32_t capacity = 0;
    etkv_cache_capacity(handle_.get(), &capacity, nullptr);
    return capacity;
  }
  /// The positions that it holds now.
  int32_t length() const {
    int32_t length = 0;
    etkv_cache_length(handle_.get(), &length, nullptr);
    return length;
  }
  /// Forgets every position, and gives the buffers back if `release`.
  Result<void> clear(bool release = false) {
    etkv_error* error = nullptr;
    const auto status = etkv_cache_clear(handle_.get(), release, &error);
    return detail::check(status, error);
  }
  /// Forgets the positions from `length` on.
  Result<void> rewind(int32_t length) {
    etkv_error* error = nullptr;
    const auto status = etkv_cache_rewind(handle_.get(), length, &error);
    return detail::check(status, error);
  }
  Memory memory() const {
    etkv_memory raw{};
    raw.struct_size = sizeof(raw);
    etkv_cache_memory(handle_.get(), &raw, nullptr);
    return {raw.allocated, raw.used, raw.at_capacity};
  }

 private:
  detail::Handle<etkv_cache, etkv_cache_free> handle_;
};

/// What one attention layer stores; see etkv_layer_config.
struct LayerConfig {
  int32_t n_kv_heads = 0;
  int32_t k_head_dim = 0;
  int32_t v_head_dim = 0;
  int32_t window = 0;
};

/// What a cache is to be; see etkv_cache_config.
struct CacheConfig {
  std::vector<LayerConfig> layers;
  int32_t capacity = 0;
  int32_t min_chunk = 0;
  etkv_format k_format = ETKV_FORMAT_DEFAULT;
  etkv_format v_format = ETKV_FORMAT_DEFAULT;
};

/// A cache of one's own, in the registry for as long as this lives.
///
/// `Face` is what the runner may do with it: `Cache` here.
template <typename Face>
class CacheSession {
 public:
  static Result<CacheSession> make(
      const std::string& backend_id,
      const CacheConfig& config) {
    std::vector<etkv_layer_config> layers;
    layers.reserve(config.layers.size());
    for (const auto& layer : config.layers) {
      etkv_layer_config raw{};
      raw.struct_size = sizeof(raw);
      raw.n_kv_heads = layer.n_kv_heads;
      raw.k_head_dim = layer.k_head_dim;
      raw.v_head_dim = layer.v_head_dim;
      raw.window = layer.window;
      layers.push_back(raw);
    }
    etkv_cache_config raw{};
    raw.struct_size = sizeof(raw);
    raw.layers = layers.data();
    raw.n_layers = layers.size();
    raw.capacity = config.capacity;
    raw.min_chunk = config.min_chunk;
    raw.k_format = config.k_format;
    raw.v_format = config.v_format;

    etkv_session* session = nullptr;
    etkv_error* error = nullptr;
    const auto status = etkv_session_new(
        backend_id.c_str(), Face::kKind, &raw, &session, &error);
    if (status != ETKV_OK) {
      return Error::adopt(status, error);
    }
    return CacheSession(session);
  }

  /// What a program is loaded with, as the backend option `cache_key`.
  const char* key() const {
    return etkv_session_key(handle_.get());
  }
  Face& cache() {
    return face_;
  }
  const Face& cache() const {
    return face_;
  }
  Face* operator->() {
    return &face_;
  }

 private:
  explicit CacheSession(etkv_session* raw)
      : handle_(raw), face_(etkv_session_cache(raw)) {}

  detail::Handle<etkv_session, etkv_session_free> handle_;
  Face face_;
};

/// One growing sequence: plain decoding.
inline Result<CacheSession<Cache>> make_decode_session(
    const std::string& backend_id,
    const CacheConfig& config) {
  return CacheSession<Cache>::make(backend_id, config);
}

} // namespace etkv
