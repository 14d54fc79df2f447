// etkv::Result: a value or an error, and the effect of reading the absent one.

#include "etkv/result.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "check.h"

namespace {

using etkv::Error;
using etkv::Result;

Error full() {
  return Error(ETKV_ERROR_CAPACITY, "17 positions, the capacity is 16");
}

static_assert(std::is_same_v<Result<int>::value_type, int>);
static_assert(std::is_same_v<Result<int>::error_type, Error>);
static_assert(std::is_same_v<Result<void>::value_type, void>);

void a_value() {
  Result<std::string> result(std::string("four"));
  CHECK(result.has_value() && result.ok() && result);
  CHECK(*result == "four" && result.value() == "four");
  CHECK_INT(result->size(), 4);
  result->push_back('!');
  *result += '!';
  const Result<std::string>& constant = result;
  CHECK(*constant == "four!!" && constant.value() == "four!!");
  CHECK_INT(constant->size(), 6);
  CHECK(constant.value_or("other") == "four!!");
  static_assert(std::is_same_v<decltype(*constant), const std::string&>);
  static_assert(std::is_same_v<decltype(*std::move(result)), std::string&&>);
}

void an_error() {
  const Result<std::string> result(full());
  CHECK(!result.has_value() && !result.ok() && !result);
  CHECK_INT(result.error().status(), ETKV_ERROR_CAPACITY);
  CHECK(result.error().status_name() == std::string("CAPACITY"));
  CHECK_HAS(result.error().message().c_str(), "the capacity is 16");
  CHECK(result.value_or("other") == "other");
  CHECK(Result<std::string>(full()).value_or("other") == "other");
}

/// A move-only value is moved out.
void what_has_one_owner() {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(7));
  const std::unique_ptr<int> taken = *std::move(result);
  CHECK(taken != nullptr && *taken == 7);
  const auto other =
      Result<std::unique_ptr<int>>(full()).value_or(std::make_unique<int>(8));
  CHECK_INT(*other, 8);
}

void success() {
  const Result<void> fine;
  CHECK(fine.has_value() && fine.ok() && fine);
  fine.value();
  *fine;
  const Result<void> failed(full());
  CHECK(!failed.has_value() && !failed.ok() && !failed);
  CHECK_INT(failed.error().status(), ETKV_ERROR_CAPACITY);
}

void one_after_the_other() {
  const auto half = [](int n) -> Result<int> {
    if (n % 2 != 0) {
      return Error(ETKV_ERROR_SHAPE, "odd");
    }
    return n / 2;
  };
  const Result<int> twelve(12);
  CHECK_INT(*twelve.and_then(half).and_then(half), 3);
  const auto odd = twelve.and_then(half).and_then(half).and_then(half);
  CHECK_INT(odd.error().status(), ETKV_ERROR_SHAPE);
  CHECK_INT(odd.and_then(half).error().status(), ETKV_ERROR_SHAPE);
  CHECK(*twelve.transform([](int n) { return std::to_string(n); }) == "12");
  CHECK(!odd.transform([](int n) { return n; }));

  int seen = 0;
  CHECK(twelve.transform([&](int n) { seen = n; }).ok());
  CHECK_INT(seen, 12);
  const Result<void> fine;
  CHECK_INT(*fine.and_then([&] { return half(4); }), 2);
  CHECK_INT(*fine.transform([] { return 5; }), 5);
  CHECK(fine.transform([&] { seen = 1; }).ok());
  CHECK_INT(seen, 1);
  const Result<void> failed(full());
  CHECK(!failed.transform([&] { seen = 2; }));
  CHECK(!failed.and_then([&] { return half(8); }));
  CHECK_INT(seen, 1);

  // The value of a temporary is moved.
  const auto owned = Result<std::unique_ptr<int>>(std::make_unique<int>(9))
                         .transform([](std::unique_ptr<int> p) { return p; });
  CHECK_INT(**owned, 9);
}

/// Returns what a process prints if `act` ends it by a signal; otherwise "".
template <typename Act>
std::string ended_by(Act act) {
  std::fflush(nullptr);
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    act();
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char buffer[256];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) {
    said.append(buffer, static_cast<size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT ? said : "";
}

void what_is_not_there() {
  Result<std::string> failed(full());
  const Result<std::string>& constant = failed;
  const char* words = "CAPACITY: 17 positions, the capacity is 16";
  CHECK_HAS(ended_by([&] { failed.value().clear(); }).c_str(), words);
  CHECK_HAS(ended_by([&] { (*failed).clear(); }).c_str(), words);
  CHECK_HAS(ended_by([&] { failed->clear(); }).c_str(), words);
  CHECK_HAS(ended_by([&] { (void)constant->size(); }).c_str(), words);
  CHECK_HAS(ended_by([&] { (void)*constant; }).c_str(), words);
  CHECK_HAS(ended_by([&] { (void)*std::move(failed); }).c_str(), words);
  const Result<void> nothing(full());
  CHECK_HAS(ended_by([&] { nothing.value(); }).c_str(), words);
  CHECK_HAS(ended_by([&] { *nothing; }).c_str(), words);

  const Result<int> found(3);
  const Result<void> fine;
  words = "read the error of a Result";
  CHECK_HAS(ended_by([&] { (void)found.error(); }).c_str(), words);
  CHECK_HAS(ended_by([&] { (void)fine.error(); }).c_str(), words);
  CHECK(ended_by([&] { (void)*found; }).empty());
}

} // namespace

int main() {
  a_value();
  an_error();
  what_has_one_owner();
  success();
  one_after_the_other();
  what_is_not_there();
  return check_report();
}
