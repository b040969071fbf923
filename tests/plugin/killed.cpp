// Kills threads in the middle of a kernel, then trains as if nothing had been: killed FOLDER LIBRARY BATCHES STEPS RATE KILLS
//
// Prints how many threads were killed, then the losses of the steps. A thread is ended by a system call from a signal
// handler, so that it cleans up nothing, when the instruction that was interrupted lies in LIBRARY: elsewhere it might
// hold a lock of the C library, which no library can help.
#include <dlfcn.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "trainer.h"

static std::atomic<bool> ended;
static std::string library;

static void die(int, siginfo_t *, void *context) {
  Dl_info about;
  const auto *where = static_cast<ucontext_t *>(context);
#ifdef __x86_64__
  void *at = reinterpret_cast<void *>(where->uc_mcontext.gregs[REG_RIP]);
#else
  void *at = reinterpret_cast<void *>(where->uc_mcontext.pc);
#endif
  if (!dladdr(at, &about) || library != about.dli_fname) return;
  ended = true;
  syscall(SYS_exit, 0);
}

static void fill(training::Trainer &trainer, std::ifstream &batches) {
  for (training::Tensor &input : trainer.batch)
    if (!batches.read(input.data, input.bytes)) throw std::runtime_error("BATCHES ends before the last step");
}

int main(int count, char **arguments) try {
  if (count < 7) return 2;
  library = arguments[2];
  struct sigaction action = {};
  action.sa_sigaction = die, action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
  for (int n = 0; n < std::atoi(arguments[6]); n++) {
    ended = false;
    auto *doomed = new training::Trainer(arguments[1], arguments[2], 1);  // never released: its thread is still in it
    std::ifstream batches(arguments[3], std::ios::binary);
    fill(*doomed, batches);
    std::thread thread([doomed] { for (;;) doomed->step(); });
    while (!ended) pthread_kill(thread.native_handle(), SIGUSR1), usleep(200);
    thread.join();
  }
  std::printf("%s\n", arguments[6]);
  training::Trainer trainer(arguments[1], arguments[2], 2);
  trainer.rate = std::strtof(arguments[5], nullptr);
  std::ifstream batches(arguments[3], std::ios::binary);
  for (int n = 0; n < std::atoi(arguments[4]); n++) fill(trainer, batches), std::printf("%.9g\n", trainer.step());
  return 0;
} catch (const std::exception &error) {
  return std::fprintf(stderr, "%s\n", error.what()), 1;
}
