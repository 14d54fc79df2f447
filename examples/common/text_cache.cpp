#include "examples/common/text_cache.hpp"

#include "examples/common/try.hpp"

namespace etkv::examples {

int32_t TextCache::capacity() const {
  return cache_ == nullptr ? capacity_ : cache_->capacity();
}

Result<int32_t> TextCache::length() const {
  if (cache_ == nullptr) {
    return program_->length();
  }
  return cache_->length();
}

Result<bool> TextCache::can_extend() const {
  if (cache_ == nullptr) {
    return program_->length() < capacity_;
  }
  return cache_->can_extend();
}

Result<int32_t> TextCache::rewind(int32_t length) {
  ASSIGN_OR_RETURN(const int32_t held, this->length());
  if (held <= length) {
    return held;
  }
  if (cache_ == nullptr) {
    RETURN_IF_ERROR(program_->reset());
    return 0;
  }
  const auto rewound = cache_->rewind(length);
  if (!rewound.ok() && rewound.error().status() == ETKV_ERROR_POSITION) {
    RETURN_IF_ERROR(cache_->rewind(0));
    return 0;
  }
  RETURN_IF_ERROR(rewound);
  return length;
}

Result<void> TextCache::clear() {
  return cache_ == nullptr ? program_->reset() : cache_->clear();
}

} // namespace etkv::examples
