package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/cli/client"
)

func (a *app) scaleCmd() *cobra.Command {
	var replicas int32
	c := &cobra.Command{
		Use:     "scale TYPE/NAME --replicas=N",
		Short:   "Set how many pods a workload has",
		Example: `  dunlin scale deploy/hello --replicas=3`,
		Args:    cobra.RangeArgs(1, 2),

		ValidArgsFunction: a.completeObjects,
		RunE: func(cmd *cobra.Command, args []string) error {
			if replicas < 0 {
				return usagef("--replicas=%d: must not be negative", replicas)
			}
			return a.scale(cmd.Context(), args, replicas)
		},
	}
	c.Flags().Int32Var(&replicas, "replicas", -1, "wanted number of pods")
	_ = c.MarkFlagRequired("replicas")
	return a.namespaced(c)
}

func (a *app) scale(ctx context.Context, args []string, replicas int32) error {
	c, t, err := a.oneTarget(ctx, args)
	if err != nil {
		return err
	}
	if !slices.Contains(t.res.Subresources, "scale") {
		return fmt.Errorf("%s cannot be scaled: it has no number of pods", t.res.Name)
	}
	body, err := json.Marshal(map[string]any{"spec": map[string]any{"replicas": replicas}})
	if err != nil {
		return fmt.Errorf("make request: %w", err)
	}
	path := t.res.Path(c.Namespace, t.names[0]) + "/scale"
	if err := c.JSON(ctx, client.Request{Method: http.MethodPatch, Path: path, ContentType: "application/merge-patch+json", Body: body}, nil); err != nil {
		return err
	}
	a.printf("%s/%s scaled to %s\n", t.res, t.names[0], strconv.Itoa(int(replicas)))
	return nil
}

// oneTarget resolves arguments that must name exactly one object.
func (a *app) oneTarget(ctx context.Context, args []string) (*client.Client, target, error) {
	c, err := a.client()
	if err != nil {
		return nil, target{}, err
	}
	ts, err := a.targets(ctx, c, args)
	if err != nil {
		return nil, target{}, err
	}
	if len(ts) != 1 || len(ts[0].names) != 1 {
		return nil, target{}, usagef("name exactly one object: TYPE/NAME or TYPE NAME")
	}
	return c, ts[0], nil
}
