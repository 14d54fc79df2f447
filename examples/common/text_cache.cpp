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
  return cache_->rewind_to_reachable(length);
}

Result<void> TextCache::mark_turn(int32_t end) {
  return cache_ == nullptr ? Result<void>() : cache_->mark_turn(end);
}

Result<void> TextCache::clear() {
  return cache_ == nullptr ? program_->reset() : cache_->clear();
}

} // namespace etkv::examples
