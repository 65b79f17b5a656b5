/* Gives the test cluster's srun the flags that pyxis adds, so that recipes written for pyxis run unchanged.
 *
 * --container-image takes a directory (a root file system) or a squashfs file; the task sees it under a writable
 * overlay in a mount namespace of its own. --container-mounts and --container-workdir act, the other flags are taken
 * and ignored. No registry and no user namespaces: it is a stand-in for tests, not a container runtime.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(minipyxis, 1)

#define SCRATCH "/run/minipyxis" /* a tmpfs over it is private to the task */

static char *image, *mounts, *workdir;

static int take(int which, const char *value, int remote) {
  (void)remote;
  if (which == 1) image = strdup(value);
  if (which == 2) mounts = strdup(value);
  if (which == 3) workdir = strdup(value);
  return 0;
}

static struct spank_option options[] = {
    {"container-image", "PATH", "root file system: a directory or a squashfs file", 1, 1, take},
    {"container-mounts", "SRC:DST[:ro]", "bind mounts, separated by commas", 1, 2, take},
    {"container-workdir", "PATH", "working directory inside the container", 1, 3, take},
    {"container-name", "NAME", "taken and ignored", 1, 0, take},
    {"container-env", "NAMES", "taken and ignored", 1, 0, take},
    {"container-save", "PATH", "taken and ignored", 1, 0, take},
    {"container-mount-home", NULL, "taken and ignored", 0, 0, take},
    {"no-container-mount-home", NULL, "taken and ignored", 0, 0, take},
    {"container-remap-root", NULL, "taken and ignored", 0, 0, take},
    {"no-container-remap-root", NULL, "taken and ignored", 0, 0, take},
    {"container-entrypoint", NULL, "taken and ignored", 0, 0, take},
    {"no-container-entrypoint", NULL, "taken and ignored", 0, 0, take},
    {"container-writable", NULL, "taken and ignored", 0, 0, take},
    {"container-readonly", NULL, "taken and ignored", 0, 0, take},
    SPANK_OPTIONS_TABLE_END};

int slurm_spank_init(spank_t spank, int argc, char **argv) {
  (void)argc, (void)argv;
  for (struct spank_option *o = options; o->name; o++)
    if (spank_option_register(spank, o)) return -1;
  return 0;
}

static int run(char *const argv[]) {
  int status = -1;
  pid_t pid = fork();
  if (pid == 0) {
    execvp(argv[0], argv);
    _exit(127);
  }
  if (pid < 0 || waitpid(pid, &status, 0) < 0) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int sh(const char *script, const char *a, const char *b) {
  char *argv[] = {"sh", "-ec", (char *)script, "sh", (char *)a, (char *)b, NULL};
  return run(argv);
}

static int bind_all(const char *root) {
  char *save = NULL, *list = mounts ? strdup(mounts) : NULL;
  for (char *item = list ? strtok_r(list, ",", &save) : NULL; item; item = strtok_r(NULL, ",", &save)) {
    char target[PATH_MAX], *destination = strchr(item, ':'), *flags = NULL;
    struct stat info;
    if (destination) {
      *destination++ = 0;
      if ((flags = strchr(destination, ':'))) *flags++ = 0;
    } else {
      destination = item;
    }
    if (stat(item, &info)) {
      slurm_error("minipyxis: mount source not found: %s", item);
      return -1;
    }
    snprintf(target, sizeof target, "%s%s", root, destination);
    if (sh(S_ISDIR(info.st_mode) ? "mkdir -p \"$1\"" : "mkdir -p \"$(dirname \"$1\")\"; touch \"$1\"", target, "") ||
        mount(item, target, NULL, MS_BIND | MS_REC, NULL)) {
      slurm_error("minipyxis: cannot bind %s to %s: %m", item, destination);
      return -1;
    }
    if (flags && strstr(flags, "ro") && mount(NULL, target, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL)) {
      slurm_error("minipyxis: cannot make %s read-only: %m", destination);
      return -1;
    }
  }
  return 0;
}

int slurm_spank_task_init_privileged(spank_t spank, int argc, char **argv) {
  struct stat info;
  (void)spank, (void)argc, (void)argv;
  if (!image) return 0;
  if (stat(image, &info)) {
    slurm_error("minipyxis: image not found: %s", image);
    return -1;
  }
  mkdir(SCRATCH, 0755);
  if (unshare(CLONE_NEWNS) || mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
      mount("tmpfs", SCRATCH, "tmpfs", 0, "mode=755")) {
    slurm_error("minipyxis: cannot make a mount namespace: %m");
    return -1;
  }
  if (sh("cd " SCRATCH "; mkdir lower upper work root;"
         "if [ -d \"$1\" ]; then mount --bind \"$1\" lower; else mount -t squashfs -o loop,ro \"$1\" lower; fi;"
         "mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work root; cd root;"
         "for d in proc sys dev; do mkdir -p $d; mount --rbind /$d $d; done; mkdir -p tmp etc;"
         "for f in etc/hosts etc/resolv.conf; do touch $f; mount --bind /$f $f; done",
         image, "")) {
    slurm_error("minipyxis: cannot mount %s", image);
    return -1;
  }
  if (bind_all(SCRATCH "/root")) return -1;
  if (chroot(SCRATCH "/root") || chdir("/")) {
    slurm_error("minipyxis: cannot enter %s: %m", image);
    return -1;
  }
  return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv) { /* after slurmstepd's own chdir */
  (void)spank, (void)argc, (void)argv;
  if (image && workdir && chdir(workdir)) {
    slurm_error("minipyxis: no such working directory in the container: %s", workdir);
    return -1;
  }
  return 0;
}
