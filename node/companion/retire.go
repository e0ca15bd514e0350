package companion

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// Retire ends the process in a folder once its connections are over; it takes
// no new ones. Without one it does nothing.
func Retire(dir string) error {
	if err := os.Remove(Socket(dir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("retire the process in %s: %w", dir, err)
	}
	return nil
}
