// Transfers of small arrays between the memory of the host and the memory of an NVIDIA GPU.
//
// MLX keeps arrays of the host in managed memory. When a kernel first reads such an array, its pages move to the GPU.
// On an H200 this takes 80 to 280 us for each array in every step, even for a few positions or a mask. Pinned memory
// is read over the bus in a microsecond or two. When the host reads an array, MLX moves it to managed memory
// permanently, with a new allocation each time. This file copies the array to the host instead.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "mlx/c/array.h"
#include "mlx/c/error.h"
#include "mlx/c/private/enums.h"
#include "mlx/c/private/mlx.h"
#include "mlx/version.h"

#if defined(__linux__)

#include <dlfcn.h>

#include <memory>

static_assert(
    MLX_VERSION_MAJOR == 0 && MLX_VERSION_MINOR == 32 && MLX_VERSION_PATCH == 2,
    "compare CudaBuffer with the one of this MLX");

namespace {

/// The object that a buffer of MLX for CUDA points to (mlx/backend/cuda/allocator.h, MLX 0.32.2). The host may read
/// and write memory of device -1.
struct CudaBuffer {
  void* data;
  size_t size;
  int device;
};

constexpr size_t kBlock = size_t{1} << 16;
constexpr size_t kBlocks = 64;

/// The CUDA driver, and a non-blocking stream of device 0. If MLX runs on a GPU, the driver is already loaded. The
/// build does not need the driver's header.
class Driver {
 public:
  /// Returns the driver, or null if there is none.
  static Driver* get() {
    static auto* driver = new Driver();
    return driver->ready_ ? driver : nullptr;
  }

  /// Returns memory that every device of the process can read, or null.
  void* pinned(size_t bytes) {
    constexpr unsigned kPortable = 1;
    void* memory = nullptr;
    const bool done =
        in_context([&] { return allocate_(&memory, bytes, kPortable) == 0; });
    return done ? memory : nullptr;
  }

  /// Copies computed memory of the device to the host. Returns whether it succeeded.
  bool read(void* to, const void* from, size_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(from);
    return in_context([&] {
      return copy_(to, address, bytes, stream_) == 0 && wait_(stream_) == 0;
    });
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    const auto find = [library]<typename F>(F*& function, const char* name) {
      function = reinterpret_cast<F*>(dlsym(library, name));
      return function != nullptr;
    };
    int (*retain)(void**, int) = nullptr;
    int (*make_stream)(void**, unsigned) = nullptr;
    constexpr unsigned kNonBlocking = 1;
    ready_ =
        library != nullptr && find(retain, "cuDevicePrimaryCtxRetain") &&
        find(make_stream, "cuStreamCreate") &&
        find(push_, "cuCtxPushCurrent_v2") &&
        find(pop_, "cuCtxPopCurrent_v2") && find(allocate_, "cuMemHostAlloc") &&
        find(copy_, "cuMemcpyDtoHAsync_v2") &&
        find(wait_, "cuStreamSynchronize") && retain(&context_, 0) == 0 &&
        in_context([&] { return make_stream(&stream_, kNonBlocking) == 0; });
  }

  template <typename Work>
  bool in_context(const Work& work) {
    if (push_(context_) != 0) {
      return false;
    }
    const bool done = work();
    void* before = nullptr;
    pop_(&before);
    return done;
  }

  bool ready_ = false;
  void* context_ = nullptr;
  void* stream_ = nullptr;
  int (*push_)(void*) = nullptr;
  int (*pop_)(void**) = nullptr;
  int (*allocate_)(void**, size_t, unsigned) = nullptr;
  int (*copy_)(void*, uintptr_t, size_t, void*) = nullptr;
  int (*wait_)(void*) = nullptr;
};

/// Blocks of pinned memory. All blocks are allocated at once and never freed, because MLX may release an array after
/// all other objects.
class PinnedBlocks {
 public:
  static PinnedBlocks& get() {
    static auto* blocks = new PinnedBlocks();
    return *blocks;
  }

  /// Returns a block, or null if there is none.
  void* take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      return nullptr;
    }
    void* block = free_.back();
    free_.pop_back();
    return block;
  }

  void give_back(void* block) {
    const std::lock_guard lock(mutex_);
    free_.push_back(block);
  }

 private:
  PinnedBlocks() {
    auto* driver = Driver::get();
    auto* memory = driver == nullptr
                       ? nullptr
                       : static_cast<char*>(driver->pinned(kBlock * kBlocks));
    for (size_t i = 0; memory != nullptr && i < kBlocks; ++i) {
      free_.push_back(memory + i * kBlock);
    }
  }

  std::mutex mutex_;
  std::vector<void*> free_;
};

} // namespace

// Hidden: used only by the Rust code of this crate, and not exported by libetkv.

/// Creates an array of `bytes` bytes in pinned memory. For MLX's CUDA build only. If there is no such memory or no
/// block is free, creates no array and sets `made` to false.
extern "C" __attribute__((visibility("hidden"))) int etkv_mlx_array_pinned(
    mlx_array* array,
    bool* made,
    const void* data,
    size_t bytes,
    const int* shape,
    size_t rank,
    mlx_dtype dtype) {
  *made = false;
  if (bytes > kBlock) {
    return 0;
  }
  void* block = nullptr;
  try {
    auto& blocks = PinnedBlocks::get();
    block = blocks.take();
    if (block == nullptr) {
      return 0;
    }
    std::memcpy(block, data, bytes);
    const auto give_back = [&blocks](mlx::core::allocator::Buffer buffer) {
      auto* kept = static_cast<CudaBuffer*>(buffer.ptr());
      blocks.give_back(kept->data);
      delete kept;
    };
    mlx::core::Shape sizes(shape, shape + rank);
    auto kept = std::make_unique<CudaBuffer>(CudaBuffer{block, kBlock, -1});
    // From here on the array releases the block. If creating the array fails, the block is leaked.
    block = nullptr;
    mlx::core::array pinned(
        mlx::core::allocator::Buffer(kept.release()),
        std::move(sizes),
        mlx_dtype_to_cpp(dtype),
        give_back);
    mlx_array_set_(*array, std::move(pinned));
    *made = true;
    return 0;
  } catch (const std::exception& error) {
    if (block != nullptr) {
      PinnedBlocks::get().give_back(block);
    }
    mlx_error(error.what());
    return 1;
  }
}

/// Stores the address of the elements of a computed array of MLX for CUDA, or 0 if they are not computed. Kernels of
/// other libraries can use this address until the host reads the array through MLX, which moves it.
extern "C" __attribute__((visibility("hidden"))) int etkv_mlx_array_address(
    uint64_t* address,
    const mlx_array array) {
  *address = 0;
  try {
    auto& found = mlx_array_get_(array);
    if (!found.is_available()) {
      return 0;
    }
    const auto* buffer = static_cast<const CudaBuffer*>(found.buffer().ptr());
    // Device 0, or memory that device 0 shares with the host.
    if (buffer != nullptr && buffer->data != nullptr && buffer->device <= 0) {
      *address = reinterpret_cast<uint64_t>(buffer->data) +
                 static_cast<uint64_t>(found.offset());
    }
    return 0;
  } catch (const std::exception& error) {
    mlx_error(error.what());
    return 1;
  }
}

/// Copies the elements of a computed, row-contiguous array of MLX for CUDA. If the host can read the elements in
/// place, or if there is no driver, copies nothing and sets `done` to false.
extern "C" __attribute__((visibility("hidden"))) int
etkv_mlx_array_read(bool* done, void* to, size_t bytes, const mlx_array array) {
  *done = false;
  try {
    auto& found = mlx_array_get_(array);
    const auto* buffer = static_cast<const CudaBuffer*>(found.buffer().ptr());
    // The stream belongs to device 0.
    if (buffer == nullptr || buffer->device != 0 || bytes != found.nbytes()) {
      return 0;
    }
    if (auto* driver = Driver::get()) {
      *done = driver->read(
          to, static_cast<const char*>(buffer->data) + found.offset(), bytes);
    }
    return 0;
  } catch (const std::exception& error) {
    mlx_error(error.what());
    return 1;
  }
}

#endif
