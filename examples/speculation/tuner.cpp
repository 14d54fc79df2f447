#include "examples/speculation/tuner.hpp"

#include <algorithm>

namespace etkv::examples {
namespace {

/// The factor by which each new observation scales older ones: for long-term
/// and for recent acceptance.
constexpr double kFade = 0.97;
constexpr double kLateFade = 0.8;
/// The assumed acceptance of an untried candidate, by its rank. The assumption
/// counts as this number of observations.
constexpr double kFirst = 0.5;
constexpr double kFurther = 0.3;
constexpr double kBelief = 2.0;
constexpr double kLateBelief = 1.0;
/// The number of steps without a tree before any comparison. The first steps of
/// a process, and the first step of each size, are slow.
constexpr int64_t kSingles = 4;
/// The depth of the first trials, which are chains. The drafts of these trials
/// take this share of the time, or more if trials would otherwise come too
/// late.
constexpr int64_t kTrials = 2;
constexpr int64_t kTrialDepth = 3;
constexpr double kEarlyTrialShare = 0.02;
constexpr double kMaxEarlyPatience = 32.0;
/// The minimum and maximum steps without a tree before a trial, and the share
/// of the time that the drafts of trials take. Verification takes additional
/// time.
constexpr double kPatience = 16.0;
constexpr double kMaxPatience = 256.0;
constexpr double kTrialShare = 0.01;
/// The number of steps with a tree after which a step without a tree is
/// measured again.
constexpr int64_t kMaxTrees = 256;

} // namespace

TreeShape Tuner::next(const DraftSeconds& draft_seconds) {
  TreeShape best;
  best.depth = depth_.value_or(kTrialDepth);
  best.width = width_.value_or(1);
  if (depth_ && width_) {
    return best;
  }
  is_trial_ = false;
  // Measure the cost of a single id first, and then of trees.
  if ((singles_ < kSingles || behind_ >= kMaxTrees) && !depth_) {
    best.depth = 0;
    return best;
  }
  is_trial_ = static_cast<double>(without_) >=
              patience(draft_seconds(best.depth, best.width));
  if (trees_ < kTrials && (is_trial_ || depth_)) {
    return best;
  }
  if (trees_ == 0) {
    best.depth = 0;
    return best;
  }
  // Try a tree if the last one was long ago.
  const int64_t shallowest = is_trial_ ? 1 : 0;
  const int64_t narrowest = width_.value_or(1);
  double most = -1.0;
  for (int64_t depth = depth_.value_or(shallowest);
       depth <= depth_.value_or(kDeepest);
       ++depth) {
    // Without a tree the width is 0.
    const int64_t widest = depth == 0 ? narrowest : width_.value_or(kWidest);
    for (int64_t width = narrowest; width <= widest; ++width) {
      if (const double found = promise(depth, width, draft_seconds);
          found > most) {
        most = found;
        best.depth = depth;
        best.width = width;
      }
    }
  }
  return best;
}

/// Returns the expected ids per second.
double Tuner::promise(
    int64_t depth,
    int64_t width,
    const DraftSeconds& draft_seconds) const {
  const double each = acceptance(width);
  double ids = 1.0;
  double reached = 1.0;
  for (int64_t level = 0; level < depth; ++level) {
    reached *= each;
    ids += reached;
  }
  const double nodes =
      1.0 + filled_ * static_cast<double>(depth) * static_cast<double>(width);
  const double seconds = verification_.at(nodes) +
                         (depth == 0 ? 0.0 : draft_seconds(depth, width));
  // Avoid a division by 0 if no cost was measured.
  return ids / std::max(seconds, 1e-9);
}

double Tuner::patience(double first_draft_seconds) const {
  const double step = std::max(verification_.at(1.0), 1e-9);
  if (trees_ < kTrials) {
    const double draft = std::max(first_draft_seconds, trial_seconds_);
    return std::min(draft / (kEarlyTrialShare * step), kMaxEarlyPatience);
  }
  const double wanted = trial_seconds_ / (kTrialShare * step);
  return std::clamp(wanted, kPatience, kMaxPatience);
}

void Tuner::observe(
    const TreeShape& asked,
    const TokenTree& tree,
    const VerificationResult& verified,
    double seconds,
    double draft_seconds) {
  verification_.add(tree.size(), seconds);
  ++without_;
  if (tree.size() == 1) {
    // A step without draft tokens has no observation of candidates.
    ++singles_;
    behind_ = 0;
    return;
  }
  ++trees_;
  ++behind_;
  if (is_trial_) {
    trial_seconds_ = draft_seconds;
  }
  without_ = 0;
  const auto may = static_cast<double>(asked.depth * asked.width);
  filled_ += 0.1 * (static_cast<double>(tree.size() - 1) / may - filled_);
  const auto deepest = static_cast<size_t>(tree.depths.back());
  for (size_t i = 0; i < std::min(verified.accepted.size(), deepest); ++i) {
    const auto children = tree.children(verified.accepted[i]);
    const bool went_on = i + 1 < verified.accepted.size();
    for (size_t rank = 0; rank < static_cast<size_t>(asked.width); ++rank) {
      const bool accepted = went_on && rank < children.size() &&
                            children[rank] == verified.accepted[i + 1];
      ranks_[std::min<size_t>(rank, kWidest - 1)].add(accepted, kFade);
      if (rank == 0) {
        late_.add(accepted, kLateFade);
      }
    }
  }
}

double Tuner::acceptance(int64_t width) const {
  double sum = 0.0;
  double belief = kFirst;
  for (size_t rank = 0; rank < static_cast<size_t>(width); ++rank) {
    const Rank& found = ranks_[std::min<size_t>(rank, kWidest - 1)];
    const double all = found.share(belief, kBelief);
    sum += rank == 0 ? std::min(all, late_.share(belief, kLateBelief)) : all;
    belief *= kFurther;
  }
  return std::min(sum, 0.99);
}

} // namespace etkv::examples
