package cli

import (
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane"
)

func (a *app) serverRaiseLevelCmd() *cobra.Command {
	var req controlplane.LevelRequest
	var yes bool
	c := &cobra.Command{
		Use:   "raise-level --yes",
		Short: "Let the cluster use what its new version brought, once every server has it",
		Long: `Let the cluster use what its new version brought, once every server has it.

After an upgrade the servers go on as the version before did, so that it can be
undone. Raising the feature level ends that, for good: from then on a server of
an older version stops with a line that says so. It is refused while a server
does not answer or is too old. Nodes need not be upgraded first: servers accept
those of two levels before. 'dunlin server list' shows the levels.`,
		Example: `  dunlin server raise-level        # says what would be done
  dunlin server raise-level --yes`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := a.client()
			if err != nil {
				return err
			}
			req.DryRun = !yes
			body, err := json.Marshal(req)
			if err != nil {
				return fmt.Errorf("make request: %w", err)
			}
			var reply controlplane.LevelReply
			r := client.Request{Method: http.MethodPost, Path: controlplane.LevelPath, ContentType: client.JSON, Body: body}
			if err := cl.JSON(cmd.Context(), r, &reply); err != nil {
				return err
			}
			switch {
			case reply.From == reply.To:
				a.notef("the feature level is %d: there is nothing to raise\n", reply.From)
			case !yes:
				return usagef("this raises the feature level from %d to %d, and no server can go back to a version before; say --yes if that is meant", reply.From, reply.To)
			default:
				a.notef("the feature level is %d, and was %d\n", reply.To, reply.From)
			}
			return nil
		},
	}
	c.Flags().Uint32Var(&req.Level, "to", 0, "the level (default: the highest that every server understands)")
	c.Flags().BoolVar(&yes, "yes", false, "do it")
	return c
}
