// Turns exceptions into messages, because they must not leave a library that is called as C.
#pragma once

#include <exception>
#include <string>

namespace promptq {

// Runs the action. Returns null, or the message of its exception, valid until the thread's next call.
template <typename Action>
const char* guarded(const Action& action) {
  static thread_local std::string message;
  try {
    action();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace promptq
