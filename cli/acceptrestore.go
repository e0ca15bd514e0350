package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/manifests"
)

func (a *app) acceptRestoreCmd() *cobra.Command {
	var all bool
	c := &cobra.Command{
		Use:   "accept-restore NAME... | --all",
		Short: "Let nodes follow a restored state that is older than what they run",
		Long: `Let nodes follow a restored state that is older than what they run.

After 'dunlin snapshot restore' a node that has seen a newer state does not roll
back: pods that the restored state does not know run on, newer contents stay,
and the pods whose place they have are not started. The node's condition
HeldAfterRestore says what is held, and so do its events.

Apply again what shall stay (the manifests of the newer versions): what is
written after the restore is followed as ever. Then accept: what is still held is
stopped, and what the cluster lists is started. It holds for this restore alone,
and cannot be taken back.`,
		Example: `  dunlin describe node greenhouse-7
  dunlin node accept-restore greenhouse-7
  dunlin node accept-restore --all`,
		Args: func(_ *cobra.Command, args []string) error {
			if (len(args) == 0) != all {
				return usagef("give the names of nodes, or --all: 'dunlin get nodes' shows HeldAfterRestore where something is held")
			}
			return nil
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			cl, err := a.client()
			if err != nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), completeWait)
			defer cancel()
			names, _ := holders(ctx, cl) // without a server there is nothing to offer
			return left(names, args), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.client()
			if err != nil {
				return err
			}
			if all {
				if args, err = holders(cmd.Context(), cl); err != nil {
					return err
				}
				if len(args) == 0 {
					return errors.New("no node holds anything after a restore: there is nothing to accept")
				}
			}
			var list controlplane.ServerList
			if err := cl.JSON(cmd.Context(), client.Request{Method: http.MethodGet, Path: controlplane.ServersPath}, &list); err != nil {
				return err
			}
			var failed []error
			for _, name := range args {
				failed = append(failed, a.acceptRestore(cmd.Context(), cl, name, strconv.FormatUint(list.Epoch, 10)))
			}
			return errors.Join(failed...)
		},
	}
	c.Flags().BoolVar(&all, "all", false, "all nodes that hold something")
	return c
}

// holders are the names of the nodes that hold something.
func holders(ctx context.Context, c *client.Client) (names []string, err error) {
	var l corev1.NodeList
	if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: "/api/v1/nodes"}, &l); err != nil {
		return nil, err
	}
	for i := range l.Items {
		if heldOn(&l.Items[i]) != "" {
			names = append(names, l.Items[i].Name)
		}
	}
	return names, nil
}

// heldOn is what the node says that it holds; "" is nothing.
func heldOn(n *corev1.Node) string {
	i := slices.IndexFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == manifests.ConditionHeldAfterRestore && c.Status == corev1.ConditionTrue
	})
	if i < 0 {
		return ""
	}
	return n.Status.Conditions[i].Message
}

func (a *app) acceptRestore(ctx context.Context, c *client.Client, name, epoch string) error {
	var n corev1.Node
	if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: nodePath(name)}, &n); err != nil {
		return err
	}
	switch {
	case n.Annotations[manifests.AnnotationAcceptRestore] == epoch:
		a.printf("node/%s already accepted: it follows once it is connected\n", name)
		return nil
	case heldOn(&n) == "":
		return fmt.Errorf("node %s holds nothing after a restore, or was not here since: there is nothing to accept ('dunlin describe node %s' shows its condition HeldAfterRestore)", name, name)
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{manifests.AnnotationAcceptRestore: epoch}}})
	if err != nil {
		return fmt.Errorf("make request: %w", err)
	}
	r := client.Request{Method: http.MethodPatch, Path: nodePath(name), ContentType: "application/merge-patch+json", Body: body}
	if err := c.JSON(ctx, r, nil); err != nil {
		return err
	}
	a.printf("node/%s accepted: it follows the restored state\n", name)
	return nil
}
