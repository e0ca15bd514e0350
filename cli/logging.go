package cli

import (
	"io"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"
)

type logOptions struct {
	level  string
	format string
}

func (o *logOptions) add(c *cobra.Command) {
	c.Flags().StringVar(&o.level, "log-level", "info", "debug, info, warn or error")
	c.Flags().StringVar(&o.format, "log-format", "text", "text or json")
}

func (o *logOptions) logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.level)); err != nil {
		return nil, usagef("--log-level=%s: debug, info, warn and error are known", o.level)
	}
	h := &slog.HandlerOptions{Level: level}
	switch strings.ToLower(o.format) {
	case "text":
		return slog.New(slog.NewTextHandler(w, h)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, h)), nil
	}
	return nil, usagef("--log-format=%s: text and json are known", o.format)
}
