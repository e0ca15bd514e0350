package install

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// removeWhole removes a file or folder, and says so. Of a folder that is a
// mount point, as an SSD that is to keep the writes, what is in it goes: whose
// disk it is and what mounts it (/etc/fstab) is not ours.
func removeWhole(path string) (did string, err error) {
	self, below := mounts(path)
	if below != "" {
		return "", fmt.Errorf("remove %s: %s is still mounted below it: 'umount %s', then again", path, below, below)
	}
	if !self {
		if err := os.RemoveAll(path); err != nil {
			return "", fmt.Errorf("remove: %w", err)
		}
		return "removed  " + path, nil
	}
	for _, f := range contents(path) {
		if err := os.RemoveAll(f); err != nil {
			return "", fmt.Errorf("remove: %w", err)
		}
	}
	return "emptied  " + path + " (a mount point, which stays)", nil
}

// contents of a mount point, without what the file system made.
func contents(path string) []string {
	entries, _ := os.ReadDir(path) // one that cannot be read is not emptied either
	var list []string
	for _, e := range entries {
		if e.Name() != "lost+found" {
			list = append(list, filepath.Join(path, e.Name()))
		}
	}
	return list
}

// mountPath undoes what the kernel does to the paths of its list.
var mountPath = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// mounts says whether a file system is mounted at the path, and names one that
// is mounted below it: nothing of Dunlin's may walk into somebody's data.
func mounts(path string) (self bool, below string) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return false, ""
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		switch at := mountPath.Replace(f[4]); {
		case at == path:
			self = true
		case strings.HasPrefix(at, path+"/"):
			below = at
		}
	}
	return self, below
}
