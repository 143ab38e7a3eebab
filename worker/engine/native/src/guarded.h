// Exceptions cannot leave a library that is called as C.
#pragma once

#include <exception>
#include <string>

namespace promptq {

// Runs the action. Returns null, or its exception's message, which is kept until the thread's next call.
template <typename Action>
const char* guarded(const Action& action) {
  static thread_local std::string said;
  try {
    action();
    return nullptr;
  } catch (const std::exception& error) {
    said = error.what();
    return said.c_str();
  }
}

}  // namespace promptq
