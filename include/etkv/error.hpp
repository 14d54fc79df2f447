// What went wrong, as C++ has it. A part of etkv.hpp.
#pragma once

#include <string>
#include <utility>

#include "etkv/error.h"

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
  /// The name of the status, as in "CAPACITY".
  const char* status_name() const {
    return etkv_status_name(status_);
  }
  const std::string& message() const {
    return message_;
  }

 private:
  etkv_status status_;
  std::string message_;
};

} // namespace etkv
