/* Stands for pyxis: a SPANK plugin that only has pyxis' options for srun, and writes those that srun was given to the
   file SAID. The declarations are those of Slurm's spank(8), so that no header is needed. */
#include <stdint.h>
#include <stdio.h>

typedef struct spank_handle *spank_t;
typedef int (*spank_opt_cb_f)(int val, const char *optarg, int remote);
struct spank_option {
  char *name;
  char *arginfo;
  char *usage;
  int has_arg;
  int val;
  spank_opt_cb_f cb;
};
extern int spank_option_register(spank_t spank, struct spank_option *option);

const char plugin_name[] = "pyxis_options";
const char plugin_type[] = "spank";
const uint32_t plugin_version = VERSION;
const unsigned int spank_plugin_version = 1;

/* Names and has_arg as in args.c of pyxis. */
static struct { const char *name; int has_arg; } OPTIONS[] = {
    {"container-image", 1},         {"container-mounts", 1},     {"container-workdir", 1},
    {"container-name", 1},          {"container-save", 1},       {"container-mount-home", 0},
    {"no-container-mount-home", 0}, {"container-remap-root", 0}, {"no-container-remap-root", 0},
    {"container-env", 1},           {"container-writable", 0},   {"container-readonly", 0},
};

static int note(int val, const char *optarg, int remote) {
  FILE *file = remote ? NULL : fopen(SAID, "a");
  if (file) {
    fprintf(file, "%s=%s\n", OPTIONS[val].name, optarg ? optarg : "");
    fclose(file);
  }
  return 0;
}

int slurm_spank_init(spank_t spank, int argc, char **argv) {
  for (int each = 0; each < (int)(sizeof OPTIONS / sizeof *OPTIONS); each++) {
    struct spank_option option = {
        (char *)OPTIONS[each].name, OPTIONS[each].has_arg ? "VALUE" : NULL, "stands for pyxis", OPTIONS[each].has_arg, each, note};
    if (spank_option_register(spank, &option) != 0)
      return -1;
  }
  return 0;
}
