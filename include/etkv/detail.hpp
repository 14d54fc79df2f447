// Helpers that call the C interface from C++, not for users of etkv. A part of
// etkv.hpp.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "etkv/error.h"
#include "etkv/error.hpp"
#include "etkv/result.hpp"

namespace etkv {

namespace detail {
/// A C handle that is freed once.
template <typename T, void (*Free)(T*)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T* raw) : raw_(raw) {}
  Handle(Handle&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    Handle taken(std::move(other));
    std::swap(raw_, taken.raw_);
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

/// Calls a C function, and returns its error as a Result.
template <typename Call>
Result<void> run(Call call) {
  etkv_error* error = nullptr;
  const etkv_status status = call(&error);
  if (status == ETKV_OK) {
    return {};
  }
  return Error::adopt(status, error);
}

/// Calls a C function that stores a value.
template <typename T, typename Call>
Result<T> ask(Call call) {
  T value{};
  etkv_error* error = nullptr;
  const etkv_status status = call(&value, &error);
  if (status == ETKV_OK) {
    return value;
  }
  return Error::adopt(status, error);
}

/// Calls a C function that fills an array: once for the number of elements,
/// once for the elements. Repeats both if the number grew in between.
template <typename T, typename Call>
Result<std::vector<T>> ask_list(Call call) {
  std::vector<T> list;
  for (;;) {
    size_t n = 0;
    if (auto counted = run([&](etkv_error** error) {
          return call(nullptr, size_t{0}, &n, error);
        });
        !counted.ok()) {
      return counted.error();
    }
    list.resize(n);
    size_t found = 0;
    auto filled = run([&](etkv_error** error) {
      return call(list.data(), n, &found, error);
    });
    if (filled.ok() && found <= n) {
      list.resize(found);
      return list;
    }
    // The call failed for a reason other than too little room.
    size_t now = 0;
    if (!filled.ok() &&
        (call(nullptr, size_t{0}, &now, nullptr) != ETKV_OK || now <= n)) {
      return filled.error();
    }
  }
}
} // namespace detail

} // namespace etkv
