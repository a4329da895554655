/* A library to preload: the clock of chosen processes is ahead by the seconds (8 bytes) that $JUMP_FILE has now.
   Chosen are those with $JUMP_WORD in their first arguments, or, with $JUMP_NODE, those of that node of a job step. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *jump;
static int is_meant(const char *word) {
  char text[65536]; int n = 0, r, d = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  while (n < 65535 && (r = read(d, text + n, 65535 - n)) > 0) n += r;
  close(d); text[n] = 0; char *at = text;
  for (int k = 0; k < 6 && at < text + n; at += strlen(at) + 1, k++) if (strstr(at, word)) return 1;
  return 0;
}
__attribute__((constructor)) static void begin(void) {
  const char *file = getenv("JUMP_FILE"), *word = getenv("JUMP_WORD"), *node = getenv("JUMP_NODE");
  const char *here = getenv("SLURM_NODEID");
  int is_here = node && here && getenv("SLURM_PROCID") && !strcmp(node, here);
  int d = file && (is_here || (word && is_meant(word))) ? open(file, O_RDONLY | O_CLOEXEC) : -1;
  if (d < 0) return;
  void *map = mmap(0, 8, PROT_READ, MAP_SHARED, d, 0); close(d);
  if (map != MAP_FAILED) jump = map;
}
int clock_gettime(clockid_t c, struct timespec *t) {
  int r = syscall(SYS_clock_gettime, c, t);
  if (!r && jump && (c == CLOCK_REALTIME || c == CLOCK_REALTIME_COARSE)) t->tv_sec += *jump;
  return r;
}
int gettimeofday(struct timeval *restrict t, void *restrict z) {
  struct timespec s; clock_gettime(CLOCK_REALTIME, &s); t->tv_sec = s.tv_sec; t->tv_usec = s.tv_nsec / 1000; return 0;
}
time_t time(time_t *t) { struct timespec s; clock_gettime(CLOCK_REALTIME, &s); if (t) *t = s.tv_sec; return s.tv_sec; }
