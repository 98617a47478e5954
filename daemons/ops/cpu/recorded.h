// Calls of entry points as data: a step's calls are recorded once, and replayed by one call.
#pragma once
#include <iterator>
#include <type_traits>
#include <utility>

union Argument {
  long number;
  const void* address;
  float real;
};

struct RecordedCall {
  long (*run)(const Argument*);
  Argument arguments[14];
};

template <typename T>
T value_of(Argument a) {
  if constexpr (std::is_pointer_v<T>) return (T)a.address;
  else if constexpr (std::is_floating_point_v<T>) return a.real;
  else return a.number;
}

template <typename... T, size_t... I>
long call_with(long (*function)(T...), const Argument* a, std::index_sequence<I...>) {
  static_assert(sizeof...(T) <= std::size(RecordedCall{}.arguments));
  return function(value_of<T>(a[I])...);
}

template <auto FUNCTION>
struct Recorded;
template <typename... T, long (*FUNCTION)(T...)>
struct Recorded<FUNCTION> {
  static long run(const Argument* a) { return call_with(FUNCTION, a, std::index_sequence_for<T...>{}); }
};

// The entry point `name` for calls that are replayed, as `recorded_name`.
#define RECORDED(name) \
  long recorded_##name(const Argument* a) { return Recorded<name>::run(a); }
