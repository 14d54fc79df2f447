// Ids of backends: etkv's delegate, or another backend that is registered as
// MLXBackend. A part of executorch.hpp, which includes this file.
//
// ExecuTorch's registry holds one backend for each id, the first one.
// ExecuTorch's macOS packages bring their own MLXBackend. So etkv's delegate
// also has an id that no other backend uses. open_module writes that id into a
// program while it reads the program.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include <executorch/extension/data_loader/file_data_loader.h>
#include <executorch/extension/data_loader/mmap_data_loader.h>
#include <executorch/extension/module/module.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/data_loader.h>

#include "etkv/etkv.hpp"

namespace etkv {

/// The backend id in programs for MLX, and in sessions for these programs.
inline constexpr char kMLXBackend[] = "MLXBackend";

/// The backend id of sessions for CPU programs.
inline constexpr char kCPUBackend[] = "cpu";

/// The backend id in CPU programs for the calls that etkv executes.
inline constexpr char kCPUDelegate[] = "EtkvForCPU";

/// The id that etkv's delegate always has. This id has the length of
/// kMLXBackend, and replaces it in a program.
inline constexpr char kEtkvBackend[] = "EtkvForMLX";

static_assert(sizeof(kEtkvBackend) == sizeof(kMLXBackend));

/// Returns the id under which this process runs programs on etkv's delegate:
/// kMLXBackend, or kEtkvBackend if another backend is registered as
/// MLXBackend. Returns nullptr if the delegate is not loaded.
inline const char* delegate_backend_id() {
  namespace runtime = ::executorch::runtime;
  const auto* own = runtime::get_backend_class(kEtkvBackend);
  if (own == nullptr) {
    return nullptr;
  }
  return runtime::get_backend_class(kMLXBackend) == own ? kMLXBackend
                                                        : kEtkvBackend;
}

namespace detail {

/// Replaces kMLXBackend by kEtkvBackend in the tables of a program. A
/// flatbuffer stores a string as its length in four bytes, its characters and a
/// zero byte.
inline void rename_backend(char* tables, std::size_t size) {
  constexpr std::size_t kLength = sizeof(kMLXBackend) - 1;
  std::string from(4, '\0');
  from[0] = static_cast<char>(kLength);
  from.append(kMLXBackend, kLength + 1);
  char* const end = tables + size;
  for (char* at = tables;
       (at = std::search(at, end, from.begin(), from.end())) != end;
       at += from.size()) {
    std::memcpy(at + 4, kEtkvBackend, kLength);
  }
}

/// Reads through another loader, and renames the backend in the tables of the
/// program. The tables are copied; weights and payloads are not.
class RenamingLoader final : public ::executorch::runtime::DataLoader {
 public:
  using FreeableBuffer = ::executorch::runtime::FreeableBuffer;

  explicit RenamingLoader(
      std::unique_ptr<::executorch::runtime::DataLoader> loader)
      : loader_(std::move(loader)) {}

  ::executorch::runtime::Result<FreeableBuffer> load(
      std::size_t offset,
      std::size_t size,
      const SegmentInfo& info) const override {
    auto read = loader_->load(offset, size, info);
    if (!read.ok() || info.segment_type != SegmentInfo::Type::Program) {
      return read;
    }
    // The alignment of ExecuTorch's loaders, which a flatbuffer needs.
    constexpr std::align_val_t kAlignment{64};
    void* copy = ::operator new(size, kAlignment, std::nothrow);
    if (copy == nullptr) {
      return ::executorch::runtime::Error::MemoryAllocationFailed;
    }
    std::memcpy(copy, read->data(), size);
    rename_backend(static_cast<char*>(copy), size);
    return FreeableBuffer(copy, size, [](void*, void* data, std::size_t) {
      ::operator delete(data, kAlignment);
    });
  }

  ::executorch::runtime::Error load_into(
      std::size_t offset,
      std::size_t size,
      const SegmentInfo& info,
      void* buffer) const override {
    return loader_->load_into(offset, size, info, buffer);
  }

  ::executorch::runtime::Result<std::size_t> size() const override {
    return loader_->size();
  }

 private:
  std::unique_ptr<::executorch::runtime::DataLoader> loader_;
};

/// Opens a file with a loader of this type, on the heap.
template <typename Loader, typename... Options>
Result<std::unique_ptr<::executorch::runtime::DataLoader>> open_file(
    const std::string& path,
    Options... options) {
  auto made = Loader::from(path.c_str(), options...);
  if (!made.ok()) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "cannot open the program " + path + ": " +
            ::executorch::runtime::to_string(made.error()));
  }
  return std::unique_ptr<::executorch::runtime::DataLoader>(
      std::make_unique<Loader>(std::move(made.get())));
}

} // namespace detail

/// Opens the program at `path` so that etkv's delegate runs it, even if another
/// backend is registered as MLXBackend.
///
/// If etkv's delegate is registered as MLXBackend, this is `Module(path,
/// mode)`. Otherwise MLXBackend is replaced by kEtkvBackend in memory, not in
/// the file. ETKV_ERROR_PROGRAM then means that the file cannot be opened.
/// ETKV_ERROR_UNSUPPORTED if the delegate is not in this process.
inline Result<std::unique_ptr<::executorch::extension::Module>> open_module(
    const std::string& path,
    ::executorch::extension::Module::LoadMode mode =
        ::executorch::extension::Module::LoadMode::Mmap) {
  using ::executorch::extension::FileDataLoader;
  using ::executorch::extension::MmapDataLoader;
  using ::executorch::extension::Module;
  const char* id = delegate_backend_id();
  if (id == nullptr) {
    return Error(
        ETKV_ERROR_UNSUPPORTED,
        "etkv's delegate is not in this process; link etkv::mlx_backend");
  }
  if (std::strcmp(id, kMLXBackend) == 0) {
    return std::make_unique<Module>(path, mode);
  }
  auto loader = [&] {
    using Lock = MmapDataLoader::MlockConfig;
    switch (mode) {
      case Module::LoadMode::File:
        return detail::open_file<FileDataLoader>(path);
      case Module::LoadMode::MmapUseMlock:
        return detail::open_file<MmapDataLoader>(path, Lock::UseMlock);
      case Module::LoadMode::MmapUseMlockIgnoreErrors:
        return detail::open_file<MmapDataLoader>(
            path, Lock::UseMlockIgnoreErrors);
      default:
        return detail::open_file<MmapDataLoader>(path, Lock::NoMlock);
    }
  }();
  if (!loader.ok()) {
    return loader.error();
  }
  return std::make_unique<Module>(
      std::make_unique<detail::RenamingLoader>(std::move(loader.value())));
}

} // namespace etkv
