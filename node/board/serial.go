package board

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
)

// Serial is what only this machine says of itself, below root ("/" but in
// tests): the board's serial number and what its firmware adds. It does not lie
// on the disk, so a disk in another machine has another one. "" where the
// machine says nothing, or says it to root alone.
func Serial(root string) string {
	var out []string
	for _, p := range []string{
		"sys/firmware/devicetree/base/serial-number", // a Pi's is burnt into its processor (OTP)
		"sys/class/dmi/id/product_uuid",
		"sys/class/dmi/id/board_serial",
	} {
		b, err := os.ReadFile(filepath.Join(root, p))
		if text := string(bytes.Trim(b, "\x00 \n")); err == nil && text != "" {
			out = append(out, filepath.Base(p)+"="+text)
		}
	}
	return strings.Join(out, "\n")
}
