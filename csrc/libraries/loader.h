#pragma once
#include <dlfcn.h>

#include <initializer_list>

namespace warpsmith::libraries {

// A library that is not linked but found at first use: the copy that torch has loaded, by the first of the file names
// that is loaded. No second copy is opened. A table of the functions that are needed is in a header for each library.
class Loaded {
 public:
  Loaded(std::initializer_list<const char*> names) {
    for (const char* name : names)
      if (!library_) library_ = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
  }

  // Null if there is no such function. A library that the program links under another name, or statically, is found
  // among the symbols of the process.
  template <class Function> Function* find(const char* name) const {
    void* found = library_ ? dlsym(library_, name) : nullptr;
    return reinterpret_cast<Function*>(found ? found : dlsym(RTLD_DEFAULT, name));
  }

 private:
  void* library_ = nullptr;
};

}  // namespace warpsmith::libraries
