// A stopwatch for the parts of a computation.
#pragma once

#include <chrono>

namespace holdfast {

// Measures the seconds between one call of lap() and the next.
class Laps {
 public:
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    const std::chrono::duration<double> since = now - last_;
    last_ = now;
    return since.count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace holdfast
