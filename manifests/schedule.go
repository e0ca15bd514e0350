package manifests

import (
	"fmt"
	"time"

	// The zones are part of the binary (450 KB): a small board has none of
	// its own, and all servers must agree on them.
	_ "time/tzdata"

	"github.com/robfig/cron/v3"
)

// ParseSchedule reads a CronJob's schedule: five fields, or a descriptor such
// as @daily.
func ParseSchedule(expr string) (s cron.Schedule, err error) {
	defer func() {
		if r := recover(); r != nil { // the parser panics on some malformed zones
			s, err = nil, fmt.Errorf("invalid schedule format: %v", r)
		}
	}()
	return cron.ParseStandard(expr)
}

// LoadZone finds a CronJob's time zone; nil is UTC, wherever the server is.
func LoadZone(name *string) (*time.Location, error) {
	if name == nil {
		return time.UTC, nil
	}
	return time.LoadLocation(*name)
}
