package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sort"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"
)

const systemConfigFile = "/etc/dunlin/config.yaml"

func defaultConfigFile() string {
	if p := os.Getenv("DUNLIN_CONFIG"); p != "" {
		return p
	}
	return systemConfigFile
}

// applyConfig fills the flags that the command line left alone: from the
// DUNLIN_ variables first, then from the configuration file. Keys of the file
// that no command knows are errors; keys of other commands are fine.
func applyConfig(cmd *cobra.Command, file string) error {
	values, err := readConfig(file, cmd.Flags().Changed("config") || os.Getenv("DUNLIN_CONFIG") != "")
	if err != nil {
		return err
	}
	if err := checkKeys(cmd.Root(), file, values); err != nil {
		return err
	}
	var errs []error
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Changed || f.Name == "help" || f.Name == "version" || f.Name == "config" {
			return
		}
		name := "DUNLIN_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		if v, ok := os.LookupEnv(name); ok {
			if err := cmd.Flags().Set(f.Name, v); err != nil {
				errs = append(errs, usagef("%s=%s: %s", name, v, wantedText(f, err)))
			}
			return
		}
		if v, ok := values[f.Name]; ok {
			if err := cmd.Flags().Set(f.Name, v); err != nil {
				errs = append(errs, usagef("%s: %s: %s: %s", file, f.Name, v, wantedText(f, err)))
			}
		}
	})
	return errors.Join(append(errs, checkFolders(cmd))...)
}

// checkFolders refuses a folder without a name: it would be the one that the
// command was called in.
func checkFolders(cmd *cobra.Command) error {
	var errs []error
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if strings.HasSuffix(f.Name, "-dir") && f.Changed && strings.TrimSpace(f.Value.String()) == "" {
			errs = append(errs, usagef("--%s=%s: the name of a folder is wanted; leave it out for the usual one", f.Name, f.Value))
		}
	})
	return errors.Join(errs...)
}

func readConfig(file string, wanted bool) (map[string]string, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) && !wanted {
		return nil, nil
	}
	if errors.Is(err, fs.ErrPermission) && !wanted {
		return nil, nil // an ordinary user's kubectl-like command does not need the server's settings
	}
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	var raw map[string]any
	if err := yaml.UnmarshalStrict(b, &raw); err != nil {
		return nil, fmt.Errorf("configuration %s: %w", file, err)
	}
	out := make(map[string]string, len(raw))
	for k, v := range raw {
		switch x := v.(type) {
		case []any:
			parts := make([]string, len(x))
			for i, e := range x {
				parts[i] = fmt.Sprint(e)
			}
			out[k] = strings.Join(parts, ",")
		case map[string]any:
			return nil, fmt.Errorf("configuration %s: %s: a value or a list is wanted, not a map", file, k)
		case float64:
			out[k] = strings.TrimSuffix(fmt.Sprintf("%f", x), ".000000")
		default:
			out[k] = fmt.Sprint(x)
		}
	}
	return out, nil
}

func checkKeys(root *cobra.Command, file string, values map[string]string) error {
	known := map[string]bool{}
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		for _, set := range []*pflag.FlagSet{c.Flags(), c.PersistentFlags()} {
			set.VisitAll(func(f *pflag.Flag) { known[f.Name] = true })
		}
		for _, s := range c.Commands() {
			walk(s)
		}
	}
	walk(root)
	var unknown []string
	for k := range values {
		if !known[k] {
			unknown = append(unknown, k)
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	sort.Strings(unknown)
	return fmt.Errorf("configuration %s: unknown key %s (every key is the name of a flag, without the dashes)", file, strings.Join(unknown, ", "))
}
