#include "tap.hpp"

#include <utility>

#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/runtime/backend/interface.h>

namespace etkv::tests {
namespace {

class Tap final : public ::executorch::runtime::BackendInterface {
 public:
  /// This id replaces kMLXBackend in a program, and has the same length.
  static constexpr char kName[] = "TapBackend";

  static Tap& get() {
    static Tap tap;
    return tap;
  }

  /// Sets a change of arguments for the next execution only.
  void tamper_once(Tamper tamper) {
    tamper_ = std::move(tamper);
  }

  bool is_available() const override {
    return behind().is_available();
  }

  ::executorch::runtime::Result<::executorch::runtime::DelegateHandle*> init(
      ::executorch::runtime::BackendInitContext& context,
      ::executorch::runtime::FreeableBuffer* processed,
      ::executorch::runtime::ArrayRef<::executorch::runtime::CompileSpec> specs)
      const override {
    return behind().init(context, processed, specs);
  }

  ::executorch::runtime::Error execute(
      ::executorch::runtime::BackendExecutionContext& context,
      ::executorch::runtime::DelegateHandle* handle,
      ::executorch::runtime::Span<EValue*> arguments) const override {
    std::vector<EValue*> copy(arguments.begin(), arguments.end());
    if (const Tamper tamper = std::exchange(tamper_, nullptr)) {
      tamper(copy);
    }
    return behind().execute(context, handle, {copy.data(), copy.size()});
  }

  void destroy(::executorch::runtime::DelegateHandle* handle) const override {
    behind().destroy(handle);
  }

 private:
  static const BackendInterface& behind() {
    const auto* backend = ::executorch::runtime::get_backend_class(kMLXBackend);
    REQUIRE(backend != nullptr);
    return *backend;
  }

  mutable Tamper tamper_;
};

std::string read_and_redirect(const std::string& name) {
  std::string bytes = contents(program_path(name));
  static_assert(sizeof(kMLXBackend) == sizeof(Tap::kName));
  const size_t at = bytes.find(kMLXBackend);
  REQUIRE(at != std::string::npos);
  return bytes.replace(at, sizeof(Tap::kName) - 1, Tap::kName);
}

} // namespace

void no_output(std::vector<EValue*>& arguments) {
  static EValue nothing(int64_t{1});
  arguments.back() = &nothing;
}

void open_tap() {
  REQUIRE(
      ::executorch::runtime::register_backend({Tap::kName, &Tap::get()}) ==
      ::executorch::runtime::Error::Ok);
}

Tapped::Tapped(int32_t capacity, const Change& change, const std::string& kind)
    : program_(read_and_redirect("tiny-llama-f32")),
      module_(
          std::make_unique<::executorch::extension::BufferDataLoader>(
              program_.data(),
              program_.size())) {
  auto config =
      make_config(must(read_kv_cache_metadata(module_)), capacity, "f32", 4);
  if (change) {
    change(config);
  }
  session_ =
      std::make_unique<Session>(must(Session::make(kMLXBackend, kind, config)));

  ::executorch::runtime::BackendOptions<1> options;
  REQUIRE(
      options.set_option("cache_key", session_->key()) ==
      ::executorch::runtime::Error::Ok);
  ::executorch::runtime::LoadBackendOptionsMap map;
  REQUIRE(
      map.set_options(Tap::kName, options.view()) ==
      ::executorch::runtime::Error::Ok);
  REQUIRE(
      module_.load_method("forward", nullptr, nullptr, &map) ==
      ::executorch::runtime::Error::Ok);
}

Tapped::~Tapped() = default;

Result<Rows> Tapped::step(Ids ids, int64_t position, Tamper tamper) {
  const auto n = static_cast<int64_t>(ids.size());
  return step(std::move(ids), run(position, n), std::move(tamper));
}

Result<Rows> Tapped::step(Ids ids, Ids positions, Tamper tamper) {
  Tap::get().tamper_once(std::move(tamper));
  return run_step(module_, std::move(ids), std::move(positions));
}

Rows Tapped::at(int64_t position, const Ids& ids) {
  return must(step(ids, position));
}

} // namespace etkv::tests
