// Stand-in for IOKit and CoreFoundation: a run loop that delivers messages from a pipe, and a record of what is called.

#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef void (*Interest)(void *refcon, uint32_t service, uint32_t message, void *argument);
typedef struct {
  uint32_t message;
  intptr_t number;
} Sent;

enum { ROOT = 4711, NOTIFIER = 12, FINISHED = 1, TIMED_OUT = 3 };
const void *kCFRunLoopDefaultMode = "default mode";
static int messages[2], calls[2], port, source, loop;
static Interest interest;

// For the test: make the pipes, and return the end from which it reads calls.
int stand_in_open(void) { return pipe(messages) || pipe(calls) ? -1 : calls[0]; }

void stand_in_send(uint32_t message, intptr_t number) {
  Sent sent = {message, number};
  if (write(messages[1], &sent, sizeof sent) != sizeof sent) abort();
}

// A run loop without sources ends.
void stand_in_end(void) { close(messages[1]); }

static void record(const char *call, long number) { dprintf(calls[1], "%s %ld\n", call, number); }

static void expect(int holds) {
  if (!holds) abort();
}

uint32_t IORegisterForSystemPower(void *refcon, void **out_port, Interest callback, uint32_t *notifier) {
  expect(refcon == NULL);
  record("register", 0);
  if (getenv("STAND_IN_REFUSES")) return 0;
  interest = callback;
  *out_port = &port;
  *notifier = NOTIFIER;
  return ROOT;
}

int IODeregisterForSystemPower(uint32_t *notifier) {
  expect(*notifier == NOTIFIER);
  record("deregister", 0);
  return 0;
}

int IOAllowPowerChange(uint32_t root, intptr_t number) {
  expect(root == ROOT);
  record("allow", number);
  return 0;
}

int IOServiceClose(uint32_t root) {
  expect(root == ROOT);
  record("close", 0);
  return 0;
}

void *IONotificationPortGetRunLoopSource(void *of) {
  expect(of == &port);
  return &source;
}

void IONotificationPortDestroy(void *of) {
  expect(of == &port);
  record("destroy", 0);
}

void *CFRunLoopGetCurrent(void) { return &loop; }

void CFRunLoopAddSource(void *to, void *added, const void *mode) {
  expect(to == &loop && added == &source && mode == kCFRunLoopDefaultMode);
  record("add", 0);
}

void CFRunLoopRemoveSource(void *from, void *removed, const void *mode) {
  expect(from == &loop && removed == &source && mode == kCFRunLoopDefaultMode);
  record("remove", 0);
}

int32_t CFRunLoopRunInMode(const void *mode, double seconds, unsigned char returns_after_one) {
  expect(mode == kCFRunLoopDefaultMode && seconds > 0 && !returns_after_one);
  struct pollfd waiting = {.fd = messages[0], .events = POLLIN};
  Sent sent;
  if (poll(&waiting, 1, (int)(seconds * 1000)) == 0) return TIMED_OUT;
  if (read(messages[0], &sent, sizeof sent) != sizeof sent) return FINISHED;
  interest(NULL, 0, sent.message, (void *)sent.number);
  return TIMED_OUT;
}
