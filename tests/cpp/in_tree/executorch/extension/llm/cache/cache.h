// Stands in for the header of this name in ExecuTorch's tree, with the
// declarations that etkv's adapter uses.
#pragma once

namespace executorch::extension::llm::cache {

class SequenceControl;
class SequencePlanner;

class CacheBase {
 public:
  virtual ~CacheBase() = default;
  virtual SequenceControl* as_control() = 0;
  virtual SequencePlanner* as_planner() = 0;
};

class SequenceControl {
 public:
  virtual ~SequenceControl() = default;
  virtual bool can_extend(int n = 1) const = 0;
  virtual int capacity() const = 0;
  virtual bool rewind(int new_len) = 0;
  virtual void clear() = 0;
};

} // namespace executorch::extension::llm::cache
