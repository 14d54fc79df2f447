// etkv_op: the time of update_and_attend on a cache, and the time of the same
// work in MLX alone, in turns. Prints a line of JSON for each length.
//
//   etkv_op HEADS KV_HEADS HEAD_DIM LAYERS DTYPE TOKENS ROUNDS LENGTH...
//
// DTYPE is f32, f16 or bf16. A step runs TOKENS new tokens after LENGTH
// positions through every layer. Each layer reads the output of the previous
// layer, and the host waits for the last layer. In MLX alone, slice_update
// writes rows into buffers of the final length, and
// fast::scaled_dot_product_attention reads a slice of them.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <mlx/mlx.h>

#include "benches/common.hpp"
#include "etkv/mlx_cache.hpp"

namespace {

namespace mx = mlx::core;

using etkv::benches::must;

struct Shape {
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int layers = 0;
  std::string format;
  int tokens = 0;

  mx::Dtype dtype() const {
    return format == "f32"   ? mx::float32
           : format == "f16" ? mx::float16
                             : mx::bfloat16;
  }
  float scale() const {
    return 1.0f / std::sqrt(static_cast<float>(head_dim));
  }
  mx::array rows(int n_heads, int n) const {
    const auto made =
        mx::astype(mx::random::normal({1, n_heads, n, head_dim}), dtype());
    mx::eval(made);
    return made;
  }
};

/// Steps through etkv's cache.
class Cached {
 public:
  Cached(const Shape& shape, int capacity)
      : shape_(shape),
        cache_(make(shape, capacity)),
        forwards_(must(etkv::MLXForwards::make(cache_))) {}

  mx::array
  step(int at, const mx::array& q, const mx::array& k, const mx::array& v) {
    const int n = k.shape(2);
    std::vector<int32_t> positions(n);
    for (int i = 0; i < n; ++i) {
      positions[i] = at + i;
    }
    auto x = q;
    const auto stream = mx::default_stream(mx::default_device());
    for (int layer = 0; layer < shape_.layers; ++layer) {
      x = must(forwards_.update_and_attend(
          layer, positions, x, k, v, shape_.scale(), stream));
    }
    mx::eval(x);
    return x;
  }

 private:
  static etkv::Cache make(const Shape& shape, int capacity) {
    etkv::CacheConfig config;
    etkv::LayerConfig layer;
    layer.n_kv_heads = shape.kv_heads;
    layer.k_head_dim = shape.head_dim;
    config.layers.assign(shape.layers, layer);
    config.capacity = capacity;
    config.k_format = config.v_format = shape.format;
    config.growth = etkv::Growth::upfront;
    return must(
        etkv::make_cache<etkv::Cache>("MLXBackend", "contiguous", config));
  }

  const Shape& shape_;
  etkv::Cache cache_;
  etkv::MLXForwards forwards_;
};

/// The same steps in MLX alone.
class Bare {
 public:
  Bare(const Shape& shape, int capacity) : shape_(shape) {
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (auto* buffers : {&k_, &v_}) {
        buffers->push_back(
            mx::zeros(
                {1, shape.kv_heads, capacity, shape.head_dim}, shape.dtype()));
      }
    }
    mx::eval(k_);
    mx::eval(v_);
  }

  mx::array
  step(int at, const mx::array& q, const mx::array& k, const mx::array& v) {
    const int end = at + k.shape(2);
    auto x = q;
    for (int layer = 0; layer < shape_.layers; ++layer) {
      const auto keys = put(k_[layer], k, at, end);
      const auto values = put(v_[layer], v, at, end);
      x = mx::fast::scaled_dot_product_attention(
          x, keys, values, shape_.scale(), end - at > 1 ? "causal" : "");
    }
    mx::eval(x);
    return x;
  }

 private:
  /// Writes rows into a buffer in place, and returns the rows up to `end`.
  mx::array put(mx::array& buffer, const mx::array& rows, int at, int end) {
    const mx::Shape begin = {0, 0, at, 0};
    const mx::Shape stop = {1, shape_.kv_heads, end, shape_.head_dim};
    buffer = mx::slice_update(std::move(buffer), rows, begin, stop);
    return mx::slice(buffer, {0, 0, 0, 0}, stop);
  }

  const Shape& shape_;
  std::vector<mx::array> k_;
  std::vector<mx::array> v_;
};

/// First fills `length` positions in chunks. Then runs `steps` steps, and
/// returns the microseconds of each.
template <typename Steps>
std::vector<double>
time_steps(const Shape& shape, Steps&& cache, int length, int steps) {
  constexpr int kPart = 256;
  for (int at = 0; at < length; at += kPart) {
    const int n = std::min(kPart, length - at);
    const auto rows = shape.rows(shape.kv_heads, n);
    cache.step(at, shape.rows(shape.heads, n), rows, rows);
  }
  std::vector<double> times;
  for (int i = 0, at = length; i <= steps; ++i, at += shape.tokens) {
    const auto q = shape.rows(shape.heads, shape.tokens);
    const auto k = shape.rows(shape.kv_heads, shape.tokens);
    const auto v = shape.rows(shape.kv_heads, shape.tokens);
    const auto start = std::chrono::steady_clock::now();
    cache.step(at, q, k, v);
    const std::chrono::duration<double, std::micro> took =
        std::chrono::steady_clock::now() - start;
    // The first step may compile kernels.
    if (i > 0) {
      times.push_back(took.count());
    }
  }
  return times;
}

std::string list(const std::vector<std::vector<double>>& rounds) {
  std::string text = "[";
  for (const auto& times : rounds) {
    text += text.size() > 1 ? ", [" : "[";
    for (size_t i = 0; i < times.size(); ++i) {
      char number[32];
      std::snprintf(
          number, sizeof(number), i > 0 ? ", %.2f" : "%.2f", times[i]);
      text += number;
    }
    text += "]";
  }
  return text + "]";
}

int run(int argc, char** argv) {
  if (argc < 9) {
    std::fprintf(
        stderr,
        "usage: etkv_op HEADS KV_HEADS HEAD_DIM LAYERS DTYPE TOKENS ROUNDS "
        "LENGTH...\n");
    return 2;
  }
  Shape shape;
  shape.heads = std::atoi(argv[1]);
  shape.kv_heads = std::atoi(argv[2]);
  shape.head_dim = std::atoi(argv[3]);
  shape.layers = std::atoi(argv[4]);
  shape.format = argv[5];
  shape.tokens = std::atoi(argv[6]);
  const int rounds = std::atoi(argv[7]);
  if (shape.heads < 1 || shape.kv_heads < 1 || shape.head_dim < 1 ||
      shape.layers < 1 || shape.tokens < 1 || rounds < 1) {
    std::fprintf(stderr, "etkv_op: expected positive numbers\n");
    return 2;
  }
  if (shape.format != "f32" && shape.format != "f16" &&
      shape.format != "bf16") {
    std::fprintf(
        stderr,
        "etkv_op: expected the dtype f32, f16 or bf16, got %s\n",
        shape.format.c_str());
    return 2;
  }
  constexpr int kSteps = 16;
  for (int i = 8; i < argc; ++i) {
    const int length = std::atoi(argv[i]);
    const int capacity = length + (kSteps + 1) * shape.tokens;
    std::vector<std::vector<double>> ours;
    std::vector<std::vector<double>> bare;
    for (int round = 0; round < rounds; ++round) {
      ours.push_back(
          time_steps(shape, Cached(shape, capacity), length, kSteps));
      bare.push_back(time_steps(shape, Bare(shape, capacity), length, kSteps));
    }
    std::printf(
        "{\"length\": %d, \"tokens\": %d, \"etkv_us\": %s, \"mlx_us\": %s}\n",
        length,
        shape.tokens,
        list(ours).c_str(),
        list(bare).c_str());
    std::fflush(stdout);
  }
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "etkv_op: %s\n", error.what());
    return 1;
  }
}
